"""The formulas for memory and traffic against what is counted on 2 and 4 ranks."""

from typing import Any

import pytest
import torch
from loops import all_ranks
from process_pool import ProcessPool, here
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from gradpolicy.optim import MaskedOptimizer
from gradpolicy.tensors.sharding import local_shard
from gradpolicy.train.lightning.fully_shard_strategy import shard_modules
from tests.distributed.collective_traffic import STRATEGIES, CountedTraffic, expected

WIDTH, DEPTH = 32, 8
ENTRIES = DEPTH * WIDTH * WIDTH


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).to(here())


def sharded(model: nn.Sequential) -> nn.Sequential:
    shard_modules(model, all_ranks())
    return model


def quarter(parameter: Tensor) -> Tensor:
    """A mask in which every fourth entry of a row trains."""
    return (torch.arange(WIDTH) % 4 == 0).expand(WIDTH, WIDTH).to(here())


def counted(strategy: str, frozen_state: str) -> dict[str, Any]:
    """What a rank holds after a step and hands to collectives within it."""
    model = network()
    wrapped = sharded(model) if strategy == "fsdp2" else DistributedDataParallel(model)
    optimizer = MaskedOptimizer(torch.optim.AdamW(model.parameters()))
    if frozen_state != "none":
        for parameter in model.parameters():
            optimizer.set_mask(parameter, quarter(parameter), frozen_state=frozen_state)
    # In its second step DistributedDataParallel settles the order of its buckets.
    for _ in range(3):
        optimizer.zero_grad()
        with CountedTraffic() as traffic:
            wrapped(torch.ones(2, WIDTH, device=here())).sum().backward()
            optimizer.mask_gradients()
            optimizer.step()
    moments = [entry[key] for entry in optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    return {
        "weights": held(list(model.parameters())),
        "gradients": held([parameter.grad for parameter in model.parameters()]),
        "moments": held(moments),
        "state": optimizer.state_bytes(),
        "payload": dict(traffic.payload),
    }


def held(tensors: list[Tensor]) -> int:
    return sum(local_shard(tensor).nbytes for tensor in tensors)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_rank_holds_and_sends_what_the_formula_says(
    pools: dict[int, ProcessPool], strategy: str, ranks: int
) -> None:
    formula = expected(strategy, ENTRIES, ranks, active=1.0)
    for rank in pools[ranks](counted, strategy, "none"):
        assert rank["payload"] == formula.payload
        assert (rank["weights"], rank["gradients"]) == (formula.weights, formula.gradients)
        assert rank["moments"] == formula.moments


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_dropped_moments_take_no_memory_on_any_rank(
    pools: dict[int, ProcessPool], strategy: str, ranks: int
) -> None:
    formula = expected(strategy, ENTRIES, ranks, active=0.25, drops=True)
    for rank in pools[ranks](counted, strategy, "drop"):
        assert rank["moments"] == formula.moments


@pytest.mark.parametrize("ranks", [2, 4])
def test_a_mask_of_entries_takes_a_byte_an_entry_of_the_shard(
    pools: dict[int, ProcessPool], ranks: int
) -> None:
    for rank in pools[ranks](counted, "fsdp2", "keep"):
        steps = 4 * DEPTH
        assert rank["state"] - rank["moments"] - steps == ENTRIES / ranks


def counted_with_a_frozen_half() -> dict[str, int]:
    """FSDP2 with the first half of the layers frozen as full tensors."""
    model = sharded(network())
    model[: DEPTH // 2].requires_grad_(False)
    with CountedTraffic() as traffic:
        model(torch.ones(2, WIDTH, device=here())).sum().backward()
    return dict(traffic.payload)


def test_frozen_layers_at_the_bottom_are_gathered_once_and_not_reduced(pair: ProcessPool) -> None:
    whole = 4 * ENTRIES
    one_layer_ahead = whole / DEPTH
    for payload in pair(counted_with_a_frozen_half):
        assert 0 <= payload["all_gather"] - 1.5 * whole <= one_layer_ahead
        assert payload["reduce_scatter"] == 0.5 * whole
