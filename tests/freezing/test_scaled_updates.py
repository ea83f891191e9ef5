"""What an optimizer adds to a parameter is scaled as another learning rate would scale it."""

import pytest
import torch
from torch import Tensor

from gradpolicy.freezing.scaled_updates import ScaledUpdates


@pytest.fixture
def parameters() -> dict[str, Tensor]:
    made = {name: torch.nn.Parameter(torch.randn(3, dtype=torch.float64)) for name in "abc"}
    made["a"].grad, made["b"].grad = torch.ones_like(made["a"]), torch.ones_like(made["b"])
    return made


def add(parameters: dict[str, Tensor], amount: float) -> None:
    for parameter in parameters.values():
        parameter.data += amount


def test_an_update_is_scaled_where_there_is_a_gradient_and_a_rate(parameters) -> None:
    first = {name: p.detach().clone() for name, p in parameters.items()}
    updates = ScaledUpdates(parameters)
    updates.begin(parameters, {"a": 0.25, "c": 0.25})
    add(parameters, 1.0)
    updates.finish(parameters)
    moved = {name: (p.detach() - first[name]) for name, p in parameters.items()}
    assert {name: round(float(way[0]), 12) for name, way in moved.items()} == {"a": 0.25, "b": 1.0, "c": 1.0}


def test_an_update_is_scaled_once(parameters) -> None:
    updates = ScaledUpdates(parameters)
    updates.begin(parameters, {"a": 0.25})
    add(parameters, 1.0)
    updates.finish(parameters)
    after = parameters["a"].detach().clone()
    updates.finish(parameters)
    assert torch.equal(parameters["a"], after)


def test_all_that_moved_since_the_first_beginning_is_scaled(parameters) -> None:
    """As in the two backward passes of a step of SAM, which moves the weights away and back in between."""
    first = parameters["a"].detach().clone()
    updates = ScaledUpdates(parameters)
    updates.begin(["a"], {"a": 0.5})
    add(parameters, 8.0)
    updates.begin(["a"], {"a": 0.5})
    add(parameters, 1.0 - 8.0)
    updates.finish(["a"])
    torch.testing.assert_close(parameters["a"].detach(), first + 0.5)


def test_a_skipped_update_leaves_every_bit(parameters) -> None:
    parameters["a"].data[:2] = torch.tensor([-0.0, float("inf")])
    first = parameters["a"].detach().clone()
    updates = ScaledUpdates(parameters)
    updates.begin(["a"], {"a": 1 / 3})
    updates.finish(["a"])
    assert torch.equal(parameters["a"].detach().view(torch.int64), first.view(torch.int64))
