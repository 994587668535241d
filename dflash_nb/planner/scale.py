"""Clusters of many hosts: which topology N-M trains fastest, what limits it, and what an epoch costs in GPU-hours.

The best M lies where N target workers compute as fast as M drafters learn and sum their gradients. That point follows from sums over
the plan; around it whole epochs run through ``timeline``, which knows what sums do not: full windows, drafters that wait for the longest
batch of a round, and links that are busy just when something is ready. An epoch of 40,000 batches takes 0.1 to 0.4 s of CPU.

Every drafter takes part in every optimiser step, so a step holds at least one batch for each, however many there are.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from dflash_nb.planner.batches import BatchPlan
from dflash_nb.planner.cost import CostModel
from dflash_nb.planner.timeline import Network, Pipeline, plan_timeline

STEP_BATCHES = 8
AROUND = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5)


@dataclass(frozen=True)
class Cluster:
    """``gpus`` devices, ``host_gpus`` on each host. between, into, within: bytes a second, as in ``Network``. feature_bytes: of a
    real token. gradient_bytes: of one drafter. together: drafters fill the first hosts, instead of being spread evenly over all.
    prefetch, waiting: as in ``Pipeline``; room_each: more of both for each drafter. least_step, least_each: fewest batches of a step,
    and of one drafter in it.

    Raises ValueError for a number that no cluster has."""

    gpus: int
    host_gpus: int = 8
    between: float = 12.5e9
    into: float = 25e9
    within: float = 25e9
    feature_bytes: float = 51_200.0
    gradient_bytes: float = 6.8e9
    together: bool = False
    prefetch: int = 8
    waiting: int = 16
    room_each: int = 0
    least_step: int = STEP_BATCHES
    least_each: int = 1

    def __post_init__(self) -> None:
        for name in ("gpus", "host_gpus", "prefetch", "least_step", "least_each", "waiting", "room_each"):
            value, least = getattr(self, name), 0 if name in ("waiting", "room_each") else 1
            if not isinstance(value, int | np.integer) or value < least:
                raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")
        for name in ("between", "into", "within", "feature_bytes", "gradient_bytes"):
            value = getattr(self, name)
            if not 0 <= value < np.inf or (value == 0 and name in ("between", "into", "within")):
                raise ValueError(f"{name} must be a finite number {'of 0 or more' if name.endswith('bytes') else 'above 0'}, not {value!r}")

    @property
    def hosts(self) -> int:
        return -(-self.gpus // self.host_gpus)

    def step_batches(self, drafters: int) -> int:
        """Batches of an optimiser step: the fewest allowed of which each drafter gets as many."""
        return drafters * max(self.least_each, -(-self.least_step // drafters))

    def network(self, workers: int, drafters: int) -> Network:
        """Where the devices of a topology are. Raises ValueError when there are not enough."""
        if workers < 1 or drafters < 1 or workers + drafters > self.gpus:
            raise ValueError(f"topology {workers}-{drafters} needs a worker, a drafter and at most {self.gpus} devices")
        place = np.arange(drafters) if self.together else np.arange(drafters) * self.gpus // drafters
        host_G = np.arange(self.gpus) // self.host_gpus
        others = np.delete(host_G, place)[:workers]
        rates = self.between, self.into, self.within
        return Network(tuple(others.tolist()), tuple(host_G[place].tolist()), *rates, self.gradient_bytes)


@dataclass(frozen=True)
class Scaled:
    """An epoch on a cluster. accumulation: batches of a step. shares: of its time that each side is busy (``Timeline.busy``)."""

    cluster: Cluster
    workers: int
    drafters: int
    accumulation: int
    steps: int
    seconds: float
    tokens: int
    shares: dict[str, float]

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.seconds

    @property
    def gpu_hours(self) -> float:
        """Of all devices of the cluster, busy or not."""
        return self.cluster.gpus * self.seconds / 3600

    @property
    def limit(self) -> str:
        """The side that is busy longest: fetch, target, drafter or network; ``sum`` where drafters spend more on sums than on learning."""
        sides = dict(self.shares)
        learn, add = sides.pop("drafter"), sides.pop("sum")
        sides["sum" if add > learn else "drafter"] = learn + add
        return max(sides, key=sides.get)


@dataclass(frozen=True)
class Work:
    """What an epoch asks of one device of each side, in seconds; ``step`` is the optimiser's for each of its steps."""

    batches: int
    tokens: int
    fetch: float
    target: float
    drafter: float
    step: float

    @classmethod
    def of(cls, cost: CostModel, plan: BatchPlan, lengths: np.ndarray) -> "Work":
        """By the cost model, without its ``transfer`` and what new shapes cost."""
        model = replace(cost.for_plan(plan), transfer=(0.0, 0.0), target_workers=1, shape=0.0, step=0.0)
        found = model.plan_seconds(plan, lengths)
        return cls(len(plan), int(plan.real_tokens.sum()), found["fetch"], found["target"], found["drafter"], cost.step)


def limits(work: Work, cluster: Cluster, workers: int, drafters: int) -> dict[str, float]:
    """Seconds of an epoch by side if nothing ever waited.

    drafter: optimiser and sums included. network: the link or entrance with the most to move if every worker computes an equal share for
    every drafter, which it does within a few percent.
    """
    network = cluster.network(workers, drafters)
    steps = -(-work.batches // cluster.step_batches(drafters))
    sums, moved = steps * network.sum_seconds, cluster.feature_bytes * work.tokens
    return {
        "fetch": work.fetch,
        "target": work.target / workers,
        "drafter": work.drafter / drafters + steps * work.step + sums,
        "network": max(moved / drafters / cluster.into, *_link_seconds(network, moved, sums)),
    }


def _link_seconds(network: Network, moved: float, sums: float) -> list[float]:
    """Seconds that each host's link is busy with its part of the features, and with sums where it has drafters."""
    workers, drafters = Counter(network.worker_hosts), Counter(network.drafter_hosts)
    seconds = []
    for host in workers | drafters:
        works, learns = workers[host] / workers.total(), drafters[host] / drafters.total()
        crossing = max(works * (1 - learns), learns * (1 - works))
        seconds.append(moved * crossing / network.between + (sums if learns and network.sums_between else 0.0))
    return seconds


def run_epoch(cost: CostModel, plan: BatchPlan, lengths: np.ndarray, cluster: Cluster, workers: int, drafters: int) -> Scaled:
    """The plan's epoch on the cluster, batch by batch. Its window is the batches of a step, a multiple of the drafters."""
    room = cluster.room_each * drafters
    pipeline = Pipeline(workers, cluster.prefetch + room, cluster.waiting + room, drafters=drafters)
    found = plan_timeline(cost, plan, lengths, pipeline, None, cluster.feature_bytes, cluster.network(workers, drafters))
    steps, tokens = -(-len(plan) // plan.options.window), int(plan.real_tokens.sum())
    return Scaled(cluster, workers, drafters, plan.options.window, steps, found.seconds, tokens, found.shares)


def best_topology(cost: CostModel, plan_of: Callable[[int], BatchPlan], lengths: np.ndarray, cluster: Cluster) -> Scaled:
    """The fastest epoch among topologies that use every device, around the one that ``limits`` prefers.

    plan_of: the plan for a number of batches a step.
    """
    if cluster.gpus < 2:
        raise ValueError(f"gpus is {cluster.gpus}: a topology needs a worker and a drafter, so at least 2 devices")
    work = Work.of(cost, plan_of(STEP_BATCHES), lengths)
    promised = min(range(1, cluster.gpus), key=lambda m: max(limits(work, cluster, cluster.gpus - m, m).values()))
    near = {promised - 1, promised + 1, *(round(promised * factor) for factor in AROUND)} & set(range(1, cluster.gpus))
    epochs = (run_epoch(cost, plan_of(cluster.step_batches(m)), lengths, cluster, cluster.gpus - m, m) for m in sorted(near))
    return min(epochs, key=lambda epoch: epoch.seconds)
