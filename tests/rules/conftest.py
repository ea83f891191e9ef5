import pytest
import torch

from gradpolicy import get_rule


@pytest.fixture
def points() -> torch.Tensor:
    """Inputs on both sides of every rule's landmarks, and on them."""
    return torch.tensor([-30.0, -2.0, -1.0, -0.3, 0.0, 0.04, 0.5, 1.0, 1.5, 30.0], dtype=torch.float64)


@pytest.fixture
def apply_rule():
    """Calls a rule of one input; the gradient is 1 unless given, the output 0 unless given."""

    def call(name, x, grad=None, output=None, **parameters):
        grad = torch.ones_like(x) if grad is None else grad
        output = torch.zeros_like(x) if output is None else output
        return get_rule(name, **parameters)(grad, (x,), output)

    return call
