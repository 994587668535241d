"""Several drafters that train as one: the first in this process, the others as actors of the Ray cluster, with the same weights.

The batches of an optimiser step are dealt to the drafters; each adds up the gradients of its own, then all sum their gradients and
their slot weights (gloo on CPUs, NCCL on GPUs) and make the same update. So a step is what one drafter would make of the same batches,
up to the order of a float sum, and plan, schedule and checkpoints do not know how many there are. Every drafter takes part in every sum,
with zeros where its batches had no anchor. A step begins its sum only when every drafter has its gradients: nobody waits for one that
failed. Hidden states go from a target worker's machine to the drafter's, not through this process.
"""

import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist

from dflash_nb.data.dataset import Batch
from dflash_nb.model.drafter import DFlashDrafter
from dflash_nb.model.target import TargetHead
from dflash_nb.pipeline.job import Job
from dflash_nb.pipeline.models import optimizer_arguments
from dflash_nb.pipeline.optimizer import DrafterOptimizer, make_optimizer, update
from dflash_nb.pipeline.ray import Elsewhere, actor_resources, get, unpack
from dflash_nb.pipeline.step import Accumulated, LossSettings, add, finish_step
from dflash_nb.pipeline.window import Ready, Window, WorkerLost

SUM_SECONDS = 120  # all have their gradients when a sum begins; it takes milliseconds


class Follower:
    """The actor: a drafter of rank 1 or more."""

    def open(self, job_facts: dict[str, Any], head: TargetHead, settings: LossSettings, state: dict[str, Any], threads: int) -> str:
        torch.set_num_threads(threads)
        device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        self.head, self.settings = head.to(device), replace(settings, device=device)
        self.drafter = DFlashDrafter(job_facts["drafter"]).to(device).train()
        self.drafter.load_state_dict(state["weights"])
        self.optimizer = make_optimizer(self.drafter, *job_facts["optimizer"])
        for part, saved in zip(self.optimizer.parts, state["parts"], strict=True):
            part.load_state_dict(saved)
        self.weight = 0.0
        return ray.util.get_node_ip_address()

    def join(self, rank: int, drafters: int, address: str, port: int) -> None:
        _join(self.settings.device, rank, drafters, dist.TCPStore(address, port, drafters, False))

    def add(self, batch: Batch, packed: dict[str, Any], way_seconds: float, fetch_seconds: float, wait_seconds: float) -> Accumulated:
        """Add the gradients of one batch; returns what there is to say about it."""
        started = time.perf_counter()
        features = unpack(packed).to(self.settings.device)
        features.seconds["transfer"] += way_seconds + time.perf_counter() - started
        one = Accumulated()
        add(Ready(batch, features, fetch_seconds, wait_seconds), one, self.drafter, self.head, self.settings)
        self.weight += one.weight
        return one

    def finish(self, learning_rate: float, grad_clip: float) -> None:
        weight, self.weight = self.weight, 0.0
        update(self.optimizer, weight, learning_rate, grad_clip, reduce=all_reduce)


class Drafters:
    """The first drafter's view of the others. Raises RuntimeError naming the drafter when one is lost; no weight has changed then."""

    def __init__(
        self, job: Job, drafter: DFlashDrafter, optimizer: DrafterOptimizer, head: TargetHead, settings: LossSettings, threads: int
    ) -> None:
        self.count = job.config.workers[1]
        self._own = (drafter, head, settings)
        actor = ray.remote(Follower).options(max_restarts=0, max_task_retries=0, **actor_resources(settings.device, threads))
        self._followers = [actor.remote() for _ in range(1, self.count)]
        facts = {"drafter": job.drafter, "optimizer": optimizer_arguments(job.config)}
        state = {"weights": _on_cpu(drafter.state_dict()), "parts": [_on_cpu(part.state_dict()) for part in optimizer.parts]}
        shared_head, shared_state = ray.put(head.to("cpu")), ray.put(state)
        try:
            opened = [follower.open.remote(facts, shared_head, settings, shared_state, threads) for follower in self._followers]
            self.nodes = self._wait(opened)
            address = ray.util.get_node_ip_address()
            store = dist.TCPStore(address, 0, self.count, True, wait_for_workers=False)
            joined = [follower.join.remote(rank, self.count, address, store.port) for rank, follower in enumerate(self._followers, 1)]
            _join(settings.device, 0, self.count, store)
            self._wait(joined)
        except BaseException:
            self.close()
            raise

    def accumulate(self, window: Window, count: int) -> tuple[Accumulated, float]:
        """Train the step's ``count`` batches, in turn on each drafter. Returns the sums over all and this drafter's own weight."""
        total, own_weight, parts = Accumulated(), 0.0, []
        for first in range(0, count, self.count):
            group = [next(window) for _ in range(min(self.count, count - first))]
            references = [self._hand_out(ready, rank) for rank, ready in enumerate(group[1:], 1)]
            one = Accumulated()
            add(group[0], one, *self._own)
            own_weight += one.weight
            parts += [one, *references]
            del group
        for part in parts:
            total.merge(part if isinstance(part, Accumulated) else self._wait([part])[0])
        return total, own_weight

    def finish_step(
        self, total: Accumulated, own_weight: float, optimizer: DrafterOptimizer, learning_rate: float, grad_clip: float
    ) -> dict[str, Any]:
        """Update the weights of all drafters; see ``step.finish_step``."""
        others = [follower.finish.remote(learning_rate, grad_clip) for follower in self._followers]
        record = finish_step(total, optimizer, learning_rate, grad_clip, own_weight, _sum_or_say_so)
        self._wait(others)
        return record

    def report(self) -> list[str]:
        """A line for each other drafter: where it is."""
        return [f"drafter-{rank} is up on node {node}" for rank, node in enumerate(self.nodes, 1)]

    def close(self) -> None:
        """End the other drafters."""
        for follower in self._followers:
            ray.kill(follower)
        if dist.is_initialized():
            dist.destroy_process_group()

    def _hand_out(self, ready: Ready, rank: int) -> Any:
        there: Elsewhere = ready.features
        return self._followers[rank - 1].add.remote(
            ready.batch, there.reference, there.way_seconds, ready.fetch_seconds, ready.wait_seconds
        )

    def _wait(self, references: list[Any]) -> list[Any]:
        try:
            return [get(reference) for reference in references]
        except WorkerLost as error:
            raise RuntimeError(f"a drafter is lost, and the others cannot go on without it: {error}. Continue with resume") from error


def all_reduce(tensors: list[torch.Tensor]) -> None:
    """Sum each tensor over all drafters, in place."""
    on_gpu = dist.get_backend() == "nccl"
    for tensor in tensors:
        summed = tensor.cuda() if on_gpu else tensor
        dist.all_reduce(summed)
        if summed is not tensor:
            tensor.copy_(summed)


def _sum_or_say_so(tensors: list[torch.Tensor]) -> None:
    try:
        all_reduce(tensors)
    except RuntimeError as error:
        raise RuntimeError(f"a drafter is lost, in the middle of a sum: {error}. Continue with resume") from error


def _join(device: torch.device, rank: int, drafters: int, store: dist.Store) -> None:
    backend = "nccl" if device.type == "cuda" else "gloo"
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group(backend, store=store, rank=rank, world_size=drafters, timeout=timedelta(seconds=SUM_SECONDS))


def _on_cpu(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu()
    if isinstance(state, dict):
        return {key: _on_cpu(value) for key, value in state.items()}
    return [_on_cpu(value) for value in state] if isinstance(state, list) else state
