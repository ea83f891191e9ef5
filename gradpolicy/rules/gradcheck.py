"""Enumerations of the outcomes of random operations, for ``gradcheck_rule``."""

import itertools
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

Outcomes = Callable[..., Iterable[tuple[Tensor, Tensor]]]


def enumerate_bits(probabilities: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every outcome of independent random bits with its probability: ``2ⁿ`` of them.

    Example:
        >>> import gradpolicy as gp
        >>> p = torch.tensor([0.5], dtype=torch.float64)
        >>> check = gp.gradcheck_rule("bernoulli", torch.bernoulli, p, outcomes=enumerate_bits)
        >>> check.exact
        True
    """
    for bits in itertools.product((0.0, 1.0), repeat=probabilities.numel()):
        output = probabilities.new_tensor(bits).reshape(probabilities.shape)
        yield torch.where(output == 1, probabilities, 1 - probabilities).prod(), output


def enumerate_categories(logits: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield every one-hot sample of one categorical variable with its probability.

    Args:
        logits: Unnormalised log-probabilities, one dimension.
    """
    yield from zip(
        torch.softmax(logits, -1),
        torch.eye(logits.numel(), dtype=logits.dtype, device=logits.device),
        strict=True,
    )
