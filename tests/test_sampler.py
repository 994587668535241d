"""The batch sampler, bare and behind accelerate's wrapper for several processes."""

import numpy as np
import pytest
from accelerate.data_loader import BatchSamplerShard, prepare_data_loader
from torch.utils.data import DataLoader

from dflash_nb.planner.sampler import PlanSampler


@pytest.fixture
def lengths():
    return np.random.default_rng(0).integers(65, 8192, 5000)


def test_one_process_yields_the_plan(lengths):
    sampler = PlanSampler(lengths, strategy="pooled", seed=3)
    assert len(sampler) == len(list(sampler)) == len(sampler.plan)
    assert sorted(i for batch in sampler for i in batch) == list(range(5000))
    assert list(sampler) == list(sampler)


@pytest.mark.parametrize("world", [2, 3])
def test_accelerate_yields_the_same_multiset_accelerate_207_4122(lengths, world):
    sampler = PlanSampler(lengths, strategy="pooled", world=world)
    shards = [BatchSamplerShard(sampler, world, rank, even_batches=False) for rank in range(world)]
    yielded = [list(shard) for shard in shards]
    assert {len(batches) for batches in yielded} == {len(sampler) // world} == {len(shard) for shard in shards}
    for rank in range(world):
        assert yielded[rank] == [sampler.plan.batch(i).sample_ids.tolist() for i in sampler.plan.rank(rank)]
    repeated = [sampler.plan.batch(i).sample_ids.tolist() for i in sampler.plan.ranks().repeated]
    expected = [*range(5000), *(i for batch in repeated for i in batch)]
    assert sorted(i for batches in yielded for batch in batches for i in batch) == sorted(expected)


def test_set_epoch_changes_the_batches_and_the_count_follows(lengths):
    sampler = PlanSampler(lengths, strategy="random", epoch=1)
    assert sampler.plan.epoch == 1
    first = list(sampler)
    sampler.set_epoch(2)
    assert list(sampler) != first and len(sampler) == len(list(sampler))
    sampler.set_epoch(1)
    assert list(sampler) == first


def test_a_prepared_loader_plans_every_epoch_anew(lengths):
    epochs = []
    for rank in range(2):
        loader = DataLoader(range(5000), batch_sampler=PlanSampler(lengths, strategy="pooled", world=2), collate_fn=list)
        shard = prepare_data_loader(loader, num_processes=2, process_index=rank, even_batches=False, put_on_device=False)
        epochs.append([list(shard) for _ in range(3)])
    for epoch, both in enumerate(zip(*epochs, strict=True)):
        plan = PlanSampler(lengths, strategy="pooled", world=2, epoch=epoch).plan
        assert [both[0], both[1]] == [[plan.batch(i).sample_ids.tolist() for i in plan.rank(rank)] for rank in range(2)]
