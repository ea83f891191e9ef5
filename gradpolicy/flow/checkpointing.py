"""Activation checkpointing that would run an operation again where its rule does not act.

A checkpointed function runs a second time in the backward pass. A rule acts there if its mode was entered
*within* the function: by a module's forward, or by a block inside. If the mode was entered only around the
checkpoint, the second run would be plain. Reentrant checkpointing would silently give the plain gradient, and
the other kind would find other saved tensors. Both are refused in the forward pass.
"""

import inspect
import sys
from types import CodeType, FrameType

import torch
from torch.utils.checkpoint import checkpoint

from gradpolicy.errors import PolicyError

_CHECKPOINT: CodeType = inspect.unwrap(checkpoint).__code__


def checkpoints_above(entered_by: CodeType | None = None) -> int:
    """Count the checkpointed functions that the caller runs in.

    Args:
        entered_by: If given, the count ends at the nearest frame of this code.
    """
    frame: FrameType | None = sys._getframe(1)
    count = 0
    while frame is not None and frame.f_code is not entered_by:
        count += frame.f_code is _CHECKPOINT
        frame = frame.f_back
    return count


def may_be_recomputed() -> bool:
    """Return True if a checkpoint may be running: gradients are off, or saved tensors have hooks."""
    if torch.compiler.is_compiling():
        return False
    if not torch.is_grad_enabled():
        return True
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def has_graph() -> bool:
    """Return True if a backward pass may follow: gradients are on, or off only because a checkpoint runs."""
    return torch.is_grad_enabled() or (not torch.compiler.is_compiling() and checkpoints_above() > 0)


def refusal(operation: str) -> PolicyError:
    """Return the error for an operation that would be recomputed outside its policy."""
    return PolicyError(
        f"operation {operation!r} runs in a checkpointed function, and its policy was entered outside of "
        "that: in the backward pass the operation would run again without the policy. Checkpoint a module "
        "that the policy matches (its forward enters the policy again), or enter gradient_override within "
        "the function"
    )
