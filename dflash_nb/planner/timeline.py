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
    """How far the stages may run apart: collated batches that may wait, places for finished batches beside one a worker (below 0 where
    there are fewer places than workers), and the bytes of features that workers and window may hold (one batch is always allowed).

    Raises ValueError for a number that no pipeline has."""

    workers: int = 1
    prefetch: int = 8
    waiting: int = 16
    most_bytes: float = float("inf")
    drafters: int = 1

    def __post_init__(self) -> None:
        for name in ("workers", "prefetch", "drafters"):
            _check_whole(name, getattr(self, name), 1)
        _check_whole("waiting", self.waiting, 1 - self.workers)
        _check_amount("most_bytes", self.most_bytes)


@dataclass(frozen=True)
class Network:
    """The host of each worker and of each drafter, and bytes a second: ``between`` of a host's link to the others, each way; ``into`` what
    one drafter can take in, wherever it comes from; ``within`` of a ring of devices in a host. summed_bytes: of one drafter's gradients.

    Raises ValueError without hosts, or for a rate of 0."""

    worker_hosts: tuple[int, ...]
    drafter_hosts: tuple[int, ...]
    between: float
    into: float
    within: float
    summed_bytes: float = 0.0

    def __post_init__(self) -> None:
        for name in ("worker_hosts", "drafter_hosts"):
            if not len(getattr(self, name)):
                raise ValueError(f"{name} must name a host at least, not {getattr(self, name)!r}")
        for name in ("between", "into", "within", "summed_bytes"):
            _check_amount(name, getattr(self, name))
            if name != "summed_bytes" and not getattr(self, name):
                raise ValueError(f"{name} must be above 0 bytes a second, not {getattr(self, name)!r}")

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

    Raises ValueError, naming the argument, for arrays that do not hold one finite number of 0 or more for each of the same batches, and for
    a ``step``, ``accumulation`` or ``network`` that cannot be.
    """
    m = np.size(target_M)
    columns = {"target_M": target_M, "fetch_M": fetch_M, "drafter_M": drafter_M}
    target, fetch, drafter = (_column(name, values, m) for name, values in columns.items())
    size = [0.0] * m if bytes_M is None else _column("bytes_M", bytes_M, m)
    _check_amount("step", step, below=np.inf)
    _check_whole("accumulation", accumulation, 1)
    prefetch, places, drafters = pipeline.prefetch, pipeline.workers + pipeline.waiting, pipeline.drafters
    if accumulation % drafters:
        raise ValueError(f"accumulation {accumulation} is no multiple of {drafters} drafters; each needs as many batches of a step")
    if network and (len(network.worker_hosts), len(network.drafter_hosts)) != (pipeline.workers, drafters):
        raise ValueError(f"the network needs a host for each of {pipeline.workers} workers and {drafters} drafters")
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


def _column(name: str, values: np.ndarray, m: int) -> list[float]:
    """The numbers of ``m`` batches; a list is faster than an array, number by number."""
    column = np.asarray(values, dtype=np.float64)
    if column.ndim != 1 or not column.size:
        raise ValueError(f"{name} must be an array of a number for each batch, one batch at least, not of shape {column.shape}")
    if len(column) != m:
        raise ValueError(f"{name} has {len(column):,} batches and target_M has {m:,}; give each array the same batches")
    if not (column.min() >= 0 and column.max() < np.inf):
        bad = int((~((column >= 0) & (column < np.inf))).argmax())
        raise ValueError(f"{name} must hold finite numbers of 0 or more; batch {bad} has {column[bad]}")
    return column.tolist()


def _check_whole(name: str, value: int, least: int) -> None:
    if isinstance(value, bool | np.bool_) or not isinstance(value, int | np.integer) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}")


def _check_amount(name: str, value: float, below: float | None = None) -> None:
    number = isinstance(value, int | float | np.integer | np.floating) and not isinstance(value, bool)
    if not (number and value >= 0 and (below is None or value < below)):
        raise ValueError(f"{name} must be a {'number' if below is None else 'finite number'} of 0 or more, not {value!r}")


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
    _check_amount("bytes_per_token", bytes_per_token, below=np.inf)
    pipeline = pipeline or Pipeline(int(cost.target_workers))
    model = replace(cost.for_plan(plan), transfer=(0.0, 0.0)) if network else cost.for_plan(plan)
    fetch_M, target_M, drafter_M = (model.plan_batch_seconds(plan, lengths, stage, slots) for stage in ("fetch", "target", "drafter"))
    target_M = model.target_workers * target_M
    if model.shape:
        rows = np.ones_like(plan.rows) if plan.strategy == "packed" else plan.rows
        _, first = np.unique(rows << 32 | plan.padded_lengths, return_index=True)
        target_M[first] += model.shape * pipeline.workers
    step, bytes_M = model.step, bytes_per_token * plan.real_tokens
    return timeline(fetch_M, target_M, drafter_M - step / model.accumulation, pipeline, bytes_M, step, model.accumulation, network)
