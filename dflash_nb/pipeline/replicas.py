"""One drafter in several processes: the same weights in each, and gradients summed over all, by PyTorch's DistributedDataParallel.

A replica adds up the gradients of its own batches and talks to nobody. ``sum_gradients`` then enters DDP once, with a pass whose gradient
is zero: DDP lays the sums into its buckets and reduces bucket after bucket (gloo on CPUs, NCCL on GPUs). So a replica without an anchor
takes part with zeros, and a reduction begins only when the caller knows that every replica has its gradients: none waits for one that
failed in its own backward pass. DDP would take the mean over replicas; a hook makes it the sum, because slots, not replicas, count alike:
the update divides by the slot weight of all. The price is that nothing is reduced during a backward pass.
"""

from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

SUM_SECONDS = 120  # all have their gradients when a sum begins; it takes milliseconds


class Replica:
    """The drafter of ``rank``, one of ``count``, which all join through ``store``. Rank 0 gives its weights to the others."""

    def __init__(self, drafter: nn.Module, rank: int, count: int, store: dist.Store) -> None:
        device = next(drafter.parameters()).device
        if device.type == "cuda":
            torch.cuda.set_device(device)
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=SUM_SECONDS))
        try:
            self._nothing = DistributedDataParallel(_Nothing(drafter), gradient_as_bucket_view=True)
        except BaseException:
            dist.destroy_process_group()
            raise
        self._nothing.register_comm_hook(None, _sum)

    def sum_gradients(self) -> None:
        """Make every gradient the sum over all replicas; each calls it once a step. Raises RuntimeError when one is gone."""
        self._nothing().backward()

    def close(self) -> None:
        """Leave the others."""
        del self._nothing
        dist.destroy_process_group()


class _Nothing(nn.Module):
    """A pass through a drafter that needs no data and gives every parameter a gradient of zero."""

    def __init__(self, drafter: nn.Module) -> None:
        super().__init__()
        self.drafter = drafter

    def forward(self) -> Tensor:
        return sum(parameter.sum() for parameter in self.drafter.parameters() if parameter.requires_grad) * 0.0


def _sum(_: None, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    return dist.all_reduce(bucket.buffer(), async_op=True).get_future().then(lambda done: done.value()[0])
