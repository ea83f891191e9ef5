"""The order of the samples depends on seed, epoch, rank and place alone; the digits are split by seed."""

from itertools import chain

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from gradpolicy.errors import PolicyError
from gradpolicy.tasks import DigitsDataModule
from gradpolicy.tasks.loading import (
    DataModule,
    EpochSampler,
    ResumableLoader,
    TensorRows,
    already_stacked,
    evaluation_batch_size,
)

ROWS = TensorRows(torch.arange(22))


def loader(
    batch_size: int = 4, epoch: int = 0, ranks: int = 1, rank: int = 0, seed: int = 0
) -> ResumableLoader:
    sampler = EpochSampler(ROWS, ranks, rank, seed=seed, drop_last=True)
    sampler.set_epoch(epoch)
    generator = torch.Generator()
    options = {"drop_last": True, "collate_fn": already_stacked, "generator": generator}
    return ResumableLoader(ROWS, batch_size, sampler=sampler, **options)


def samples(batches: ResumableLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def test_a_run_is_resumed_within_an_epoch_only_with_the_same_order_of_samples() -> None:
    saved = loader(seed=1).state_dict()
    loader(seed=1).load_state_dict(saved)
    loader(seed=1).load_state_dict({})
    for other in (loader(seed=2), loader(seed=1, batch_size=2)):
        with pytest.raises(PolicyError, match=r"saved within an epoch with .*'seed': 1"):
            other.load_state_dict(saved)
    loader(seed=1, batch_size=2, ranks=2).load_state_dict(saved)


def test_an_epoch_has_the_same_order_whenever_it_is_asked_for() -> None:
    again, before = loader(epoch=3), torch.get_rng_state()
    assert samples(loader(epoch=3)) == samples(again) == samples(again)
    assert torch.equal(before, torch.get_rng_state())


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [samples(loader(epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)]
    assert all(orders.count(order) == 1 for order in orders)


def test_ranks_together_see_the_batches_of_one_process() -> None:
    joined = samples(loader(batch_size=6, seed=7))
    ranks = [samples(loader(batch_size=2, seed=7, ranks=3, rank=rank)) for rank in range(3)]
    assert [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)] == [
        sorted(batch) for batch in joined
    ]


def test_evaluation_deals_out_each_sample_once() -> None:
    samplers = [EpochSampler(ROWS, 4, rank, shuffle=False) for rank in range(4)]
    assert sorted(chain(*samplers)) == list(range(22))
    assert [len(sampler) for sampler in samplers] == [len(list(sampler)) for sampler in samplers]


@pytest.mark.parametrize("ranks", [2, 3, 8])
def test_ranks_evaluate_equally_many_batches(ranks: int) -> None:
    for samples in range(4 * ranks, 200):
        size = evaluation_batch_size(samples, ranks, largest=8)
        fewest, most = samples // ranks, -(-samples // ranks)
        assert -(-fewest // size) == -(-most // size)


def test_a_foreign_sampler_is_used_as_it_is() -> None:
    plain = ResumableLoader(ROWS, 4, sampler=SequentialSampler(ROWS), collate_fn=already_stacked)
    assert samples(plain) == [list(batch) for batch in BatchSampler(range(22), 4, drop_last=False)]
    assert plain.state_dict() == {}


def test_wrong_settings_name_their_key() -> None:
    for key, value in (("batch_size", 0), ("workers", -1)):
        with pytest.raises(PolicyError, match=f"data.{key}"):
            DataModule(**{key: value})
    data = DataModule(batch_size=23)
    data.train_set = ROWS
    with pytest.raises(PolicyError, match="23 is too large for 22 training samples"):
        data.train_dataloader()


def parts(seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    data = DigitsDataModule(seed=seed)
    data.setup()
    return [part.tensors for part in (data.train_set, data.validation_set, data.test_set)]


def test_the_digits_are_split_in_every_class_by_the_seed() -> None:
    first, again, other = parts(0), parts(0), parts(1)
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0][1], other[0][1])
    assert [len(labels) for _, labels in first] == [1257, 180, 360]
    for _, labels in first:
        assert torch.bincount(labels, minlength=10).float().div(len(labels)).sub(0.1).abs().max() < 0.02
    images = torch.cat([images for images, _ in first])
    assert images.shape == images.unique(dim=0).shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min(), images.max()) == (0, 1)
