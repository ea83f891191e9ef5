"""What several policies together mean for one parameter, and how the optimizers are told."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.freezing.policy_masks import FreezePolicy, PolicyMasks
from gradpolicy.tensors.mask import Mask, intersect

Options = tuple[str | None, str | None]
"""``frozen_state`` and ``bias_correction``."""


class MaskingOptimizer(Protocol):
    """What the engine needs of an optimizer; :class:`gradpolicy.MaskedOptimizer` has it."""

    param_groups: list[dict[str, Any]]

    def set_masks(
        self, masks: Mapping[Tensor, Any], *, frozen_state: str | None, bias_correction: str | None
    ) -> None:
        """Sets the masks of parameters; None lets every entry train."""


def combine(policies: Iterable[PolicyMasks], name: str, parameter: Tensor) -> Mask:
    """The intersection of the masks of all policies that are in effect."""
    combined: Mask = True
    for policy in policies:
        if policy.in_effect:
            combined = intersect(combined, policy.masks[name], parameter.shape, parameter.device)
    return combined


def set_masks(optimizers: Iterable[MaskingOptimizer], masks: Mapping[Tensor, tuple[Mask, Options]]) -> None:
    """Gives each optimizer the masks of its parameters, those with the same options in one call."""
    for optimizer in optimizers:
        alike: dict[Options, dict[Tensor, Any]] = {}
        own = parameter_ids(optimizer)
        for parameter, (mask, options) in masks.items():
            if id(parameter) in own:
                alike.setdefault(options, {})[parameter] = _for_optimizer(mask, parameter)
        for (frozen_state, bias_correction), together in alike.items():
            optimizer.set_masks(together, frozen_state=frozen_state, bias_correction=bias_correction)


def parameter_ids(optimizer: MaskingOptimizer) -> set[int]:
    """The ids of an optimizer's parameters."""
    return {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}


def check_same_options(name: str, policies: Mapping[str, FreezePolicy]) -> None:
    """Makes sure that the policies on one parameter want the same optimizer state.

    Raises:
        PolicyError: If they do not; it names both.
    """
    (first, one), *rest = policies.items()
    for other, another in rest:
        for key in ("frozen_state", "bias_correction"):
            here, there = getattr(one, key), getattr(another, key)
            if here != there:
                raise PolicyError(
                    f"{name!r}: policy.{first} wants {key}={here!r}, policy.{other} {key}={there!r};"
                    f" policies on one parameter must agree: give both the same {key}, or different params"
                )


def _for_optimizer(mask: Mask, parameter: Tensor) -> Any:
    if isinstance(mask, bool):
        return None if mask else torch.zeros((), dtype=torch.bool, device=parameter.device)
    return mask.to(parameter.device) if isinstance(mask, Tensor) else mask
