"""When every batch of a plan is collated, handed to a target worker, taken by a drafter and done: the pipeline's rules, batch by batch.

One thread collates ahead, N workers take batches in plan order, what they compute and what waits has a limited number of places and
bytes, and features are taken in plan order; room appears only when something is taken, and work is handed out only then or while the first
drafter waits. The optimiser runs after each window of batches. With many places this comes to the stage with the largest sum, the cost
model's ``plan_seconds`` (within 0.01 % for the reference lengths in 109 buckets); with few, stages wait for each other: 21 % more
there with one batch a worker. 40,000 batches take 0.07 s of CPU.

Several drafters take turns: the first takes a batch for each, hands the others theirs, drafts its own and comes back for the next round.
At the end of a step they wait for each other and sum their gradients. Between hosts features queue for the sender's and the receiver's
link, in the order in which they are computed, while their worker goes on; a sum goes first.

Axis: M batches in plan order.
"""

import heapq
from dataclasses import dataclass, field, replace

import numpy as np

from dflash_nb.planner.batches import BatchPlan
from dflash_nb.planner.cost import CostModel


@dataclass(frozen=True)
class Pipeline:
    """How far the stages may run apart: collated batches that may wait, places for finished batches beside one a worker, and the bytes of
    features that workers and window may hold (one batch is always allowed)."""

    workers: int = 1
    prefetch: int = 8
    waiting: int = 16
    most_bytes: float = float("inf")
    drafters: int = 1


@dataclass(frozen=True)
class Network:
    """The host of each worker and of each drafter, and bytes a second: ``between`` of a host's link to the others, each way; ``into`` what
    one drafter can take in, wherever it comes from; ``within`` of a ring of devices in a host. summed_bytes: of one drafter's gradients."""

    worker_hosts: tuple[int, ...]
    drafter_hosts: tuple[int, ...]
    between: float
    into: float
    within: float
    summed_bytes: float = 0.0

    @property
    def sums_between(self) -> bool:
        """Whether the drafters are on several hosts."""
        return len(set(self.drafter_hosts)) > 1

    @property
    def sum_seconds(self) -> float:
        """A ring all-reduce: every drafter sends and receives 2 (M - 1) / M times the gradients, at the pace of the slowest link."""
        drafters = len(self.drafter_hosts)
        slowest = min(self.within, self.between) if self.sums_between else self.within
        return 2 * (drafters - 1) / drafters * self.summed_bytes / slowest


@dataclass(frozen=True)
class Timeline:
    """Seconds from the start at which each batch is handed to a worker, taken from the window and done, float64[M]; busy seconds by side:
    the mean worker, the mean drafter, and with a network the sums and the busiest link or drafter's entrance."""

    handed_M: np.ndarray
    taken_M: np.ndarray
    done_M: np.ndarray
    busy: dict[str, float]

    @property
    def seconds(self) -> float:
        """When the last batch is done."""
        return float(self.done_M[-1])

    @property
    def shares(self) -> dict[str, float]:
        """Share of the time that each side is busy."""
        return {side: spent / self.seconds for side, spent in self.busy.items()}


SUM = -1


@dataclass
class _Links:
    """Features on their way. A link serves who asks first; features have arrived when both ends and the drafter's entrance are done.

    asked: when, the batch or SUM, its worker. free, busy: by link, when it has served all that was asked so far, and the seconds of that.
    """

    network: Network
    asked: list[tuple[float, int, int]] = field(default_factory=list)
    arrived: dict[int, float] = field(default_factory=dict)
    free: dict[tuple[str, int], float] = field(default_factory=dict)
    busy: dict[tuple[str, int], float] = field(default_factory=dict)

    def ask(self, when: float, batch: int, worker: int = 0) -> None:
        heapq.heappush(self.asked, (when, batch, worker))

    def arrival(self, batch: int, size: list[float]) -> float:
        """When the features of ``batch`` arrive. Whatever is asked for before they are must be known."""
        network = self.network
        while batch not in self.arrived:
            when, other, worker = heapq.heappop(self.asked)
            if other == SUM:
                for host in set(network.drafter_hosts) if network.sums_between else ():
                    self._use(("out of", host), when, network.sum_seconds)
                    self._use(("to", host), when, network.sum_seconds)
                continue
            drafter = other % len(network.drafter_hosts)
            source, sink = network.worker_hosts[worker], network.drafter_hosts[drafter]
            end = self._use(("into", drafter), when, size[other] / network.into)
            if source != sink:
                seconds = size[other] / network.between
                end = max(end, self._use(("out of", source), when, seconds), self._use(("to", sink), when, seconds))
            self.arrived[other] = end
        return self.arrived.pop(batch)

    def _use(self, link: tuple[str, int], when: float, seconds: float) -> float:
        self.free[link] = max(self.free.get(link, 0.0), when) + seconds
        self.busy[link] = self.busy.get(link, 0.0) + seconds
        return self.free[link]


def timeline(
    fetch_M: np.ndarray,
    target_M: np.ndarray,
    drafter_M: np.ndarray,
    pipeline: Pipeline,
    bytes_M: np.ndarray | None = None,
    step: float = 0.0,
    accumulation: int = 1,
    network: Network | None = None,
) -> Timeline:
    """Run batches that take these seconds through the pipeline.

    target_M: what one worker needs, moving the features included unless there is a network. bytes_M: of each batch's features, none if left
    out. step: seconds of the optimiser after every ``accumulation`` batches, a multiple of the drafters.
    """
    m, prefetch, places, drafters = len(target_M), pipeline.prefetch, pipeline.workers + pipeline.waiting, pipeline.drafters
    if accumulation % drafters:
        raise ValueError(f"accumulation {accumulation} is no multiple of {drafters} drafters; each needs as many batches of a step")
    if network and (len(network.worker_hosts), len(network.drafter_hosts)) != (pipeline.workers, drafters):
        raise ValueError(f"the network needs a host for each of {pipeline.workers} workers and {drafters} drafters")
    fetch, target, drafter = (np.asarray(values, dtype=np.float64).tolist() for values in (fetch_M, target_M, drafter_M))
    size = [0.0] * m if bytes_M is None else np.asarray(bytes_M, dtype=np.float64).tolist()
    handed, computed, taken, done = ([0.0] * m for _ in range(4))
    workers, idle = [0.0] * pipeline.workers, [0.0] * drafters
    links = _Links(network) if network else None
    sum_seconds = network.sum_seconds if network else 0.0
    away: list[tuple[float, float]] = []  # when the first drafter drafts, and hands nothing out
    following = 0  # the batch that is taken next

    def take() -> None:
        nonlocal following
        k = following
        arrived = links.arrival(k, size) if links else computed[k]
        taken[k] = now = max(arrived, away[-1][1] if away else 0.0, taken[k - 1] if k else 0.0)
        following += 1
        if following % drafters and following < m:
            return
        first = k - k % drafters
        for j in range(first, following):
            done[j] = idle[j - first] = max(now, idle[j - first]) + drafter[j]
        back = idle[0]
        if following % accumulation == 0 or following == m:
            together = max(idle)
            if links:
                links.ask(together, SUM)
            back = done[k] = together + sum_seconds + step
            idle[:] = [back] * drafters
        away.append((now, back))

    collated = held = 0.0
    oldest = look = 0  # the oldest batch in the window, and the absence that a hand-over may have to wait for
    for i in range(m):
        collated = max(collated, handed[i - prefetch] if i >= prefetch else 0.0) + fetch[i]
        start = max(collated, handed[i - 1] if i else 0.0)
        while oldest < i and (i - oldest >= places or held + size[i] > pipeline.most_bytes):
            while following <= oldest:
                take()
            start = max(start, taken[oldest])
            held -= size[oldest]
            oldest += 1
        while following < i and computed[following] < start:
            take()
        while look < len(away) and away[look][1] <= start:
            look += 1
        if look < len(away) and away[look][0] < start:
            start = away[look][1]
        handed[i] = start
        held += size[i]
        worker = workers.index(min(workers))
        computed[i] = workers[worker] = max(workers[worker], start) + target[i]
        if links:
            links.ask(computed[i], i, worker)
    while following < m:
        take()
    steps = -(-m // accumulation)
    busy = {"fetch": sum(fetch), "target": sum(target) / pipeline.workers, "drafter": sum(drafter) / drafters + step * steps}
    if links:
        busy |= {"sum": sum_seconds * steps, "network": max(links.busy.values(), default=0.0)}
    return Timeline(np.array(handed), np.array(taken), np.array(done), busy)


def plan_timeline(
    cost: CostModel,
    plan: BatchPlan,
    lengths: np.ndarray,
    pipeline: Pipeline | None = None,
    slots: np.ndarray | None = None,
    bytes_per_token: float = 0.0,
    network: Network | None = None,
) -> Timeline:
    """The timeline of a plan's epoch by the cost model; by default with the model's workers and ample windows.

    lengths, slots: as in ``CostModel.plan_batch_seconds``. bytes_per_token: of features for a real token. With a network these bytes take
    their time there, and the model's ``transfer`` is left out. A shape that comes for the first time costs ``cost.shape`` more.
    """
    pipeline = pipeline or Pipeline(cost.target_workers)
    model = replace(cost.for_plan(plan), transfer=(0.0, 0.0)) if network else cost.for_plan(plan)
    fetch_M, target_M, drafter_M = (model.plan_batch_seconds(plan, lengths, stage, slots) for stage in ("fetch", "target", "drafter"))
    target_M = model.target_workers * target_M
    if model.shape:
        rows = np.ones_like(plan.rows) if plan.strategy == "packed" else plan.rows
        _, first = np.unique(rows << 32 | plan.padded_lengths, return_index=True)
        target_M[first] += model.shape * pipeline.workers
    step, bytes_M = model.step, bytes_per_token * plan.real_tokens
    return timeline(fetch_M, target_M, drafter_M - step / model.accumulation, pipeline, bytes_M, step, model.accumulation, network)
