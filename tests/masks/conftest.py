"""What the tests of mask sources share."""

from collections.abc import Callable, Mapping

import pytest
import torch
from torch import Tensor, nn

import gradpolicy as gp

Batch = tuple[Tensor, Tensor]


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


def cross_entropy(model: nn.Module, batch: Batch) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


def chosen(model: nn.Module, batches: list[Batch], mask: gp.masks.TopK) -> dict[str, Tensor]:
    """The masks of weights after a step by each batch, in which nothing moves."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with gp.training(model, optimizer, [gp.Freeze(mask, params="*.weight")]) as optimizer:
        for batch in [*batches, batches[0]]:
            cross_entropy(model, batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        weights = {name: p for name, p in model.named_parameters() if name.endswith("weight")}
        return {name: optimizer.get_mask(p).expand(p.shape).clone() for name, p in weights.items()}


def assert_same_masks(ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> None:
    assert theirs
    for name, mask in theirs.items():
        assert torch.equal(ours[name], mask.bool()), name
