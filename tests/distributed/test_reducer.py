import pytest
import torch
import torch.distributed as dist
from loops import weights_of
from networks import perceptron
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradpolicy.train.reducer import ReducerUpdater

STEPS = 8
# Which layers are frozen at which step: from the start, all but the head, a hole in the middle, nothing.
FROZEN = [("0",), ("0", "2"), ("0", "2"), ("2",), (), ("4",), ("0", "2"), ()]


def network() -> nn.Sequential:
    return perceptron(6, 8, 8, 2)


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    drawn = (torch.randn(8, 6 + 2, generator=generator).to(here()) for _ in range(STEPS))
    return [(both[:, :6], both[:, 6:]) for both in drawn]


def train(model: nn.Module, updater: ReducerUpdater | None, rank: int, ranks: int) -> dict[str, Tensor]:
    plain = model.module if isinstance(model, DistributedDataParallel) else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for frozen, (inputs, targets) in zip(FROZEN, batches(), strict=True):
        for name, parameter in plain.named_parameters():
            parameter.requires_grad_(name.split(".")[0] not in frozen)
        if updater is not None:
            updater.refresh()
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs[rank::ranks]), targets[rank::ranks]).backward()
        optimizer.step()
    return weights_of(plain)


def train_on_this_rank(options: dict[str, bool]) -> tuple[dict[str, Tensor], int]:
    plain = network()
    plain[0].requires_grad_(False)
    model = DistributedDataParallel(plain, **options)
    updater = ReducerUpdater(model)
    return train(model, updater, dist.get_rank(), dist.get_world_size()), updater.rebuilds


@pytest.mark.parametrize(
    "options",
    [{}, {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}, {"static_graph": True}],
)
def test_anything_may_freeze_and_thaw_at_any_time(pair: ProcessPool, options: dict[str, bool]) -> None:
    (first, rebuilds), (second, _) = pair(train_on_this_rank, options)
    alone = train(network(), None, 0, 1)
    for name, weight in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], weight)
    assert rebuilds == 6, "only when what trains has changed"


def counted_with_hook() -> int:
    """How many buckets a communication hook sees after the reducer was rebuilt."""
    seen = []

    def count(state: list[int], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        state.append(bucket.buffer().numel())
        work = dist.all_reduce(bucket.buffer().div_(dist.get_world_size()), async_op=True)
        return work.get_future().then(lambda future: future.value()[0])

    model = DistributedDataParallel(network())
    model.register_comm_hook(seen, count)
    updater = ReducerUpdater(model)
    model.module[0].requires_grad_(False)
    model.module[2].requires_grad_(False)
    updater.refresh()
    model(torch.ones(2, 6, device=here())).sum().backward()
    return sum(seen)


def test_communication_hooks_stay_and_see_only_what_trains(pair: ProcessPool) -> None:
    head = sum(parameter.numel() for parameter in network()[4].parameters())
    assert pair(counted_with_hook) == [head, head]


def wholly_frozen() -> str:
    model = DistributedDataParallel(network())
    updater = ReducerUpdater(model)
    model.module.requires_grad_(False)
    with pytest.raises(RuntimeError) as error:
        updater.refresh()
    return str(error.value)


def test_a_model_without_anything_to_train_is_refused(pair: ProcessPool) -> None:
    assert all("nothing to reduce" in message for message in pair(wholly_frozen))
