"""The class logits in what a model gives."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from gradpolicy.errors import PolicyError


def class_logits(output: Any) -> Tensor:
    """Take the class logits out of what a model gives.

    Args:
        output: A tensor; or a mapping or an object with `logits`.

    Raises:
        PolicyError: If there are no logits in it.
    """
    if isinstance(output, Tensor):
        return output
    logits = output.get("logits") if isinstance(output, Mapping) else getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        raise PolicyError(f"model: gave {type(output).__name__}; a tensor or something with 'logits' needed")
    return logits
