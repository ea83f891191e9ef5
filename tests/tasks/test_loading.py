"""The order of the samples is a function of seed, epoch, rank and place, and of nothing else."""

from itertools import chain

import pytest
import torch
from torch.utils.data import BatchSampler, SequentialSampler

from gradpolicy.errors import PolicyError
from gradpolicy.tasks.loading import (
    DataModule,
    EpochSampler,
    ResumableLoader,
    TensorRows,
    already_stacked,
    epoch_seed,
    evaluation_batch_size,
)

ROWS = TensorRows(torch.arange(22))


def loader(batch_size: int = 4, epoch: int = 0, **settings: int) -> ResumableLoader:
    sampler = EpochSampler(ROWS, shuffle=True, **settings)
    sampler.set_epoch(epoch)
    generator = torch.Generator()
    options = {"drop_last": True, "collate_fn": already_stacked, "generator": generator}
    return ResumableLoader(ROWS, batch_size, sampler=sampler, **options)


def samples(batches: ResumableLoader) -> list[list[int]]:
    return [batch[0].tolist() for batch in batches]


def test_an_epoch_has_the_same_order_whenever_it_is_asked_for() -> None:
    again = loader(epoch=3)
    torch.rand(5)
    assert samples(loader(epoch=3)) == samples(again) == samples(again)


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    orders = [samples(loader(epoch=epoch, seed=seed)) for epoch in range(3) for seed in range(3)]
    assert all(orders.count(order) == 1 for order in orders)


def test_the_global_random_state_is_left_alone() -> None:
    before = torch.get_rng_state()
    samples(loader())
    assert torch.equal(before, torch.get_rng_state())


def test_a_loader_begins_where_the_run_stands_and_keeps_its_length() -> None:
    whole, rest = loader(), loader()
    rest.batches_done = lambda: 3
    assert samples(rest) == samples(whole)[3:]
    assert len(rest) == len(whole) == 5


def test_ranks_together_see_the_batches_of_one_process() -> None:
    joined = samples(loader(batch_size=6, seed=7))
    ranks = [samples(loader(batch_size=2, seed=7, ranks=3, rank=rank)) for rank in range(3)]
    assert [sorted(chain(*parts)) for parts in zip(*ranks, strict=True)] == [
        sorted(batch) for batch in joined
    ]


def test_evaluation_deals_out_each_sample_once() -> None:
    shares = [list(EpochSampler(ROWS, shuffle=False, ranks=4, rank=rank, even=False)) for rank in range(4)]
    assert sorted(chain(*shares)) == list(range(22))
    lengths = [len(EpochSampler(ROWS, shuffle=False, ranks=4, rank=rank, even=False)) for rank in range(4)]
    assert lengths == [len(share) for share in shares]


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


def test_neighbouring_seeds_do_not_share_epochs() -> None:
    seeds = {epoch_seed(seed, epoch) for seed in range(50) for epoch in range(50)}
    assert len(seeds) == 2500
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_rows_come_one_by_one_or_as_a_batch() -> None:
    rows = TensorRows(torch.arange(6).view(3, 2), torch.arange(3))
    assert torch.equal(rows.__getitems__([2, 0])[0], torch.stack([rows[2][0], rows[0][0]]))
    with pytest.raises(ValueError, match="differ in length"):
        TensorRows(torch.zeros(3), torch.zeros(4))


@pytest.mark.parametrize(
    ("settings", "key"), [({"batch_size": 0}, "batch_size"), ({"workers": -1}, "workers")]
)
def test_wrong_settings_name_their_key(settings: dict[str, int], key: str) -> None:
    with pytest.raises(PolicyError, match=f"data.{key}"):
        DataModule(**settings)


def test_a_batch_larger_than_the_training_set_is_refused() -> None:
    data = DataModule(batch_size=23)
    data.train_set = ROWS
    with pytest.raises(PolicyError, match="more than the 22 training samples"):
        data.train_dataloader()
