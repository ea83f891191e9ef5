"""What the tests of mask sources share."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn


class Stack(nn.Module):
    """An embedding, four numbered blocks, a head."""

    def __init__(self, blocks: int = 4, width: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, width)
        self.blocks = nn.ModuleList(nn.Linear(width, width) for _ in range(blocks))
        self.head = nn.Linear(width, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


@pytest.fixture
def stack() -> Stack:
    return Stack()


@pytest.fixture
def prepared(stack: Stack) -> Callable:
    """Sets a source up on the stack, or on given tensors."""

    def prepare(source, parameters: Mapping[str, Tensor] | None = None, seed: int = 0):
        source.setup(dict(stack.named_parameters()) if parameters is None else parameters, seed=seed)
        return source

    return prepare


@pytest.fixture
def tokens() -> Tensor:
    return torch.arange(24).reshape(4, 6) % 6


@pytest.fixture
def trained() -> Callable:
    """Gives the names of the parameters that train as a whole."""

    def names(masks: Mapping[str, object]) -> list[str]:
        return [name for name, mask in masks.items() if mask is True]

    return names
