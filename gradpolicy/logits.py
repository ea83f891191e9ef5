"""Finds class logits in the output of a model."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradpolicy.errors import PolicyError


def class_logits(output: Any) -> Tensor:
    """Return the class logits in the output of a model.

    Args:
        output: A tensor; or a mapping or an object with `logits`.

    Raises:
        PolicyError: If it has no logits.
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise PolicyError(
            f"model: gave {type(output).__name__}; expected a tensor or an object with 'logits'"
        )
    return logits
