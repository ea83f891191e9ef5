"""What the tests of mask sources share."""

from collections.abc import Callable, Mapping

import pytest
from torch import Tensor, nn


@pytest.fixture
def prepared(stack: nn.Module) -> Callable:
    """Sets a source up on the stack, or on given tensors."""

    def prepare(source, parameters: Mapping[str, Tensor] | None = None, seed: int = 0):
        source.setup(dict(stack.named_parameters()) if parameters is None else parameters, seed=seed)
        return source

    return prepare


@pytest.fixture
def trained() -> Callable:
    """Gives the names of the parameters that train as a whole."""

    def names(masks: Mapping[str, object]) -> list[str]:
        return [name for name, mask in masks.items() if mask is True]

    return names
