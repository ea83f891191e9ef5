"""Samplers of ``torch.distributions`` under a rule, and the scores behind an index."""

import functools
from typing import Any

import torch
from torch import Tensor
from torch.distributions import Bernoulli, Categorical

from gradpolicy.flow.tracing import active_modes

# Rules that take logits where the operation takes probabilities.
OF_LOGITS = ("gumbel", "reinmax")
# The samplers as torch has them, once they are replaced.
_ORIGINAL: dict[str, Any] = {}


def replace_samplers() -> None:
    """Replace the samplers whose draws a rule cannot see; without a rule on the draw they act as before.

    ``Bernoulli.sample`` switches gradients off, and ``Categorical.sample`` transposes its draws by an
    attribute (``.T``) that compiled code does not show.
    """
    if not _ORIGINAL:
        _ORIGINAL.update(bernoulli=Bernoulli.sample, categorical=Categorical.sample)
        Bernoulli.sample = functools.wraps(Bernoulli.sample)(_draw_bits)  # type: ignore[method-assign]
        Categorical.sample = functools.wraps(Categorical.sample)(_draw_categories)  # type: ignore[method-assign]


def _draw_bits(self: Bernoulli, sample_shape: Any = ()) -> Tensor:
    if not (torch.is_grad_enabled() and _has_rule(torch.bernoulli)):
        return _ORIGINAL["bernoulli"](self, sample_shape)
    return torch.bernoulli(self.probs.expand(self._extended_shape(sample_shape)))


def _draw_categories(self: Categorical, sample_shape: Any = ()) -> Tensor:
    if not (torch.is_grad_enabled() and _has_rule(torch.multinomial)):
        return _ORIGINAL["categorical"](self, sample_shape)
    probabilities = self.probs.reshape(-1, self._num_events)
    drawn = torch.multinomial(probabilities, torch.Size(sample_shape).numel(), True)
    return drawn.t().reshape(self._extended_shape(sample_shape))


def _has_rule(function: Any) -> bool:
    """Return True if a block that runs has a rule on a function."""
    return any(function in mode.table.by_function for mode in active_modes())


def scores_of_argmax(result: Tensor, input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """Return the scores that an argmax chose by, in the shape of its one-hot code: categories last."""
    if dim is None:
        return input.reshape(*result.shape, -1)
    scores = input.movedim(dim, -1)
    return scores.unsqueeze(dim if dim >= 0 else dim - 1) if keepdim else scores


def scores_of_draw(result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Return the probabilities that ``torch.multinomial`` drew by, in the shape of the one-hot code."""
    probabilities = input / input.sum(-1, keepdim=True)
    return probabilities.unsqueeze(-2).expand(*result.shape, -1)
