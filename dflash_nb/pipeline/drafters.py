"""Several drafters that train as one: the first in this process, the others as actors of the Ray cluster, with the same weights.

The batches of an optimiser step are dealt to the drafters; each adds up the gradients of its own, then all sum them (``replicas``) and
make the same update. So a step is what one drafter would make of the same batches, up to the order of a float sum, and plan, schedule and
checkpoints do not know how many there are. A step begins its sum only when every drafter has its gradients: nobody waits for one that
failed. Hidden states go from a target worker's machine to the drafter's, not through this process. If they are gone before the drafter
has them, as when their node dies, its call fails before it has added anything, and the window computes the batch once more.
"""

import time
from dataclasses import replace
from typing import Any

import ray
import torch
import torch.distributed as dist

from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import TargetHead
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.models import optimizer_arguments
from dflash_nb.pipeline.optimizer import DrafterOptimizer, make_optimizer, update
from dflash_nb.pipeline.ray import LOST, Elsewhere, actor_options, can_receive, get, node_name, received, tensor_transport
from dflash_nb.pipeline.replicas import Replica
from dflash_nb.pipeline.step import Accumulated, LossSettings, add, finish_step
from dflash_nb.pipeline.window import Ready, Window, WorkerFailure, WorkerLost


class Follower:
    """The actor: a drafter of rank 1 or more."""

    def open(
        self, job_facts: dict[str, Any], head: TargetHead, settings: LossSettings, moments: list[Any], threads: int, transport: str
    ) -> str:
        if not can_receive(transport):
            raise ValueError(f"node {node_name()} lacks the package {transport}, which the others have; install it there")
        torch.set_num_threads(threads)
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self.head, self.settings = head.to(device), replace(settings, device=device)
        self.drafter = DFlashDrafter(job_facts["drafter"]).to(device).train()
        self.optimizer = make_optimizer(self.drafter, *job_facts["optimizer"])
        for part, saved in zip(self.optimizer.parts, moments, strict=True):
            part.load_state_dict(saved)
        return node_name()

    def join(self, rank: int, drafters: int, address: str, port: int) -> None:
        self.replica = Replica(self.drafter, rank, drafters, dist.TCPStore(address, port, drafters, False))

    def add(self, ready: Ready, sent: Any, way_seconds: float) -> Accumulated:
        """Add the gradients of one batch; returns what there is to say about it. Ray fetches ``sent`` before this is called."""
        started = time.perf_counter()
        features = received(sent).to(self.settings.device)
        features.seconds["transfer"] += way_seconds + time.perf_counter() - started
        one = Accumulated()
        add(replace(ready, features=features), one, self.drafter, self.head, self.settings)
        return one

    def finish(self, weight: float, learning_rate: float, grad_clip: float) -> None:
        """Take part in the sum and make the update that all make; ``weight`` is that of all batches of the step."""
        self.replica.sum_gradients()
        update(self.optimizer, weight, learning_rate, grad_clip)


class Drafters:
    """The first drafter's view of the others. Raises RuntimeError naming the drafter when one is lost; no weight has changed then."""

    def __init__(
        self, job: Job, drafter: DFlashDrafter, optimizer: DrafterOptimizer, head: TargetHead, settings: LossSettings, threads: int
    ) -> None:
        self.count = job.config.workers[1]
        transport = tensor_transport(settings.device)
        self._own = (drafter, head, settings)
        actor = ray.remote(**actor_options(settings.device, threads, transport))(Follower)
        self._followers = [actor.remote() for _ in range(1, self.count)]
        facts = {"drafter": job.drafter, "optimizer": optimizer_arguments(job.config)}
        shared_head, moments = ray.put(head.to("cpu")), ray.put([_on_cpu(part.state_dict()) for part in optimizer.parts])
        self._replica = None
        try:
            opened = [follower.open.remote(facts, shared_head, settings, moments, threads, transport) for follower in self._followers]
            self.nodes = self._wait(opened)
            address = ray.util.get_node_ip_address()
            store = dist.TCPStore(address, 0, self.count, True, wait_for_workers=False)
            joined = [follower.join.remote(rank, self.count, address, store.port) for rank, follower in enumerate(self._followers, 1)]
            self._replica = Replica(drafter, 0, self.count, store)
            self._wait(joined)
        except BaseException:
            self.close()
            raise

    def accumulate(self, window: Window, count: int) -> Accumulated:
        """Train the step's ``count`` batches, in turn on each drafter. Returns the sums over all.

        No drafter has more than two batches at once: what waits for it is in an object store.
        """
        total, before = Accumulated(), []
        for first in range(0, count, self.count):
            group = [next(window) for _ in range(min(self.count, count - first))]
            handed = [(rank, replace(ready, features=None), self._hand_out(rank, ready)) for rank, ready in enumerate(group[1:], 1)]
            one = Accumulated()
            add(group[0], one, *self._own)
            del group
            self._merge(window, total, before)
            before = [one, *handed]
        self._merge(window, total, before)
        return total

    def finish_step(self, total: Accumulated, optimizer: DrafterOptimizer, learning_rate: float, grad_clip: float) -> dict[str, Any]:
        """Update the weights of all drafters; see ``step.finish_step``."""
        others = [follower.finish.remote(total.weight, learning_rate, grad_clip) for follower in self._followers]
        try:
            self._replica.sum_gradients()
        except RuntimeError as error:
            raise RuntimeError(f"a drafter is lost, in the middle of a sum: {error}. Continue with resume") from error
        record = finish_step(total, optimizer, learning_rate, grad_clip)
        self._wait(others)
        return record

    def report(self) -> list[str]:
        """A line for each other drafter: where it is."""
        return [f"drafter-{rank} is up on node {node}" for rank, node in enumerate(self.nodes, 1)]

    def close(self) -> None:
        """End the other drafters."""
        for follower in self._followers:
            ray.kill(follower)
        if self._replica is not None:
            self._replica.close()

    def _hand_out(self, rank: int, ready: Ready) -> Any:
        there: Elsewhere = ready.features
        return self._followers[rank - 1].add.remote(replace(ready, features=None, failures=()), there.reference, there.way_seconds)

    def _merge(self, window: Window, total: Accumulated, parts: list[Any]) -> None:
        for part in parts:
            total.merge(part if isinstance(part, Accumulated) else self._added(window, *part))

    def _added(self, window: Window, rank: int, ready: Ready, reference: Any) -> Accumulated:
        """What the drafter of ``rank`` has added; the batch is computed again as often as the window allows if its features are lost."""
        while True:
            try:
                return self._wait([reference])[0]
            except LOST as error:
                failure = WorkerFailure(f"drafter-{rank}", f"the features were lost on the way: {type(error).__name__}")
                failure.__cause__ = error
                ready = window.again(ready, failure)
                reference = self._hand_out(rank, ready)

    def _wait(self, references: list[Any]) -> list[Any]:
        try:
            return [get(reference) for reference in references]
        except WorkerLost as error:
            raise RuntimeError(f"a drafter is lost, and the others cannot go on without it: {error}. Continue with resume") from error


def _on_cpu(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state
