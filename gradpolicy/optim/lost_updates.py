"""Finds parameters of 16 bits whose updates are smaller than the spacing of their values."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import shortened
from gradpolicy.optim.masked_optimizer import MaskedOptimizer
from gradpolicy.optim.optimizers import plain_optimizers
from gradpolicy.tensors.sharding import local_shard

# Half the distance to the next number, relative to the number.
_HALF_SPACING = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}
_COMPENSATES = ("kahan", "stochastic_round")


@torch.no_grad()
def losing_updates(parameters: Mapping[str, Tensor], optimizers: Iterable[Any]) -> list[str]:
    """Return the names of 16-bit parameters in which an update as large as the learning rate is lost.

    Those with master weights, and of optimizers that compensate for rounding themselves, are left out.

    Args:
        parameters: The parameters by name.
        optimizers: Their optimizers.
    """
    optimizers = list(optimizers)
    rates = {
        parameter: float(group.get("initial_lr", group.get("lr", torch.inf)))
        for each in plain_optimizers(optimizers)
        for group in each.param_groups
        for parameter in group["params"]
        if not any(value and part in key for key, value in group.items() for part in _COMPENSATES)
    }
    masked = [
        known for each in optimizers if isinstance(each, MaskedOptimizer) for known in each.masked.values()
    ]
    kept = {known.parameter for known in masked if known.has_master_weights}
    return [
        name
        for name, parameter in parameters.items()
        if parameter.dtype in _HALF_SPACING
        and not parameter.is_meta
        and parameter not in kept
        and rates.get(parameter, torch.inf) < _HALF_SPACING[parameter.dtype] * _mean(parameter)
    ]


def _mean(parameter: Tensor) -> float:
    return float(local_shard(parameter).abs().mean(dtype=torch.float32))


def lost_updates_warning(names: Sequence[str]) -> str:
    """Return the warning of parameters that lose updates, and what helps."""
    return (
        f"{shortened(names)}: an update as large as the learning rate is less than half the distance between "
        "neighbouring 16-bit numbers there, so that most updates are lost; pass master_weights=True, which "
        "keeps 16 more bits, or load the model in float32"
    )
