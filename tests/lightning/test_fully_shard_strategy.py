"""Which modules are gathered as one."""

import pytest
from process_pool import ProcessPool, here
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradpolicy import PolicyError
from gradpolicy.lightning.fully_shard_strategy import FullyShardStrategy, shard_modules


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 1)


def gathered(patterns: tuple[str, ...]) -> list[str]:
    """The names of the modules that were made units, after sharding twice."""
    model = Network().to(here())
    mesh = init_device_mesh(here().type, (2,))
    for _ in range(2):
        shard_modules(model, mesh, patterns)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        ((), ["", "blocks.0", "blocks.0.0", "blocks.1", "blocks.1.0"]),
        (("head",), ["", "head"]),
        (("blocks.?",), ["", "blocks.0", "blocks.1"]),
    ],
)
def test_the_chosen_modules_and_the_root_are_gathered_one_by_one(
    pair: ProcessPool, patterns: tuple[str, ...], units: list[str]
) -> None:
    assert pair(gathered, patterns) == [units, units]


def refused() -> str:
    with pytest.raises(PolicyError) as error:
        shard_modules(Network(), init_device_mesh("cpu", (2,)), ("haed",))
    return str(error.value)


def test_a_pattern_that_matches_nothing_is_refused(pair: ProcessPool) -> None:
    assert all("'haed'" in message and "head" in message for message in pair(refused))


def test_gathered_parameters_are_freed_after_the_forward_pass_unless_asked_otherwise() -> None:
    assert FullyShardStrategy().reshard_after_forward
    assert not FullyShardStrategy(reshard_after_forward=False).reshard_after_forward
