"""An optimizer without an update rule: let it step, then put frozen entries and their state back."""

from __future__ import annotations

from torch import Tensor

from gradpolicy.optim.initial_state import AS_PARAMETER, entry_state, initial_value
from gradpolicy.optim.kernels import select
from gradpolicy.optim.masked_parameter import MaskedParameter
from gradpolicy.optim.without_rule import check_state_of_entries


def save_frozen(masked: MaskedParameter) -> None:
    """Before the wrapped optimizer steps: zero frozen entries' gradients, remember what it may change."""
    assert masked.copies is not None
    masked.follow()
    parameter = masked.parameter
    if masked.active_entries:
        check_state_of_entries(masked.optimizer, parameter)
    if parameter.grad is not None:
        masked.mask_gradient(parameter.grad)
    kept = {} if masked.forgets else entry_state(masked.state, parameter)
    masked.copies.save({"": parameter, **kept})


def restore_frozen(masked: MaskedParameter) -> None:
    """After the wrapped optimizer has stepped: put frozen entries and their state back."""
    assert masked.copies is not None
    own = entry_state(masked.state, masked.parameter)
    empty_frozen(masked.copies.restore({"": masked.parameter, **own}), masked)


def empty_frozen(state: dict[str, Tensor], masked: MaskedParameter) -> None:
    """Resets the state of frozen entries to its initial values, in place, where these are known.

    Args:
        state: what has a value for each entry.
        masked: whose state it is; its ages tell what is frozen.
    """
    parameter, layout = masked.parameter, masked.layout
    for key, value in state.items():
        start = initial_value(masked.optimizer, key, masked.group, parameter)
        if start is None:
            continue
        flat = layout.flat(value)
        fill = layout.flat(parameter.detach()).to(flat.dtype) if start == AS_PARAMETER else float(start)
        select(flat.device, flat.dtype).fill_frozen(flat, masked.ages, None, masked.block, fill)
        layout.write_back(flat, value)
