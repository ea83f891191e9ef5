"""One parameter's state in the wrapped optimizer: made, packed and unpacked, and emptied."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import adam, moves
from gradpolicy.optim.beginnings import (
    AS_PARAMETER,
    beginning,
    empty,
    entry_state,
    makes_state_again,
)
from gradpolicy.optim.layout import Layout, local_shard
from gradpolicy.optim.packed import Held


class ParameterState:
    """What the wrapped optimizer remembers of one parameter.

    Its tensors have the parameter's shape ("dense"), or, for Adam and AdamW under "drop", are vectors of
    those entries that have memory ("packed"). A step count belongs to the whole tensor.

    Args:
        parameter: the parameter.
        inner: the wrapped optimizer.
        layout: the order of the parameter's entries in memory.
    """

    def __init__(self, parameter: Tensor, inner: torch.optim.Optimizer, layout: Layout) -> None:
        self.parameter = parameter
        self.inner = inner
        self.layout = layout

    @property
    def values(self) -> dict[str, Any]:
        """The optimizer's own dictionary for the parameter; empty before the first update."""
        return self.inner.state.get(self.parameter, {})

    @property
    def group(self) -> dict[str, Any]:
        """The parameter's param group."""
        return next(g for g in self.inner.param_groups if any(p is self.parameter for p in g["params"]))

    def set_step_count(self, count: int) -> None:
        """Make the optimizer count on from here, if it counts in a tensor."""
        step = self.values.get("step")
        if isinstance(step, Tensor):
            step.fill_(count)

    # --- the state of Adam and AdamW

    def begin(self, group: dict[str, Any], updates: int, held: Held | None) -> dict[str, Any]:
        """The state for an exact update, made where it is missing.

        Args:
            group: the parameter's param group.
            updates: the step count to begin with.
            held: which entries have memory; None: all.
        """
        state = self.inner.state[self.parameter]
        state.update(self.beginning(group, set(state), updates, held))
        return state

    def beginning(
        self, group: dict[str, Any], present: set[str], updates: int, held: Held | None
    ) -> dict[str, Any]:
        """What torch's Adam would begin with, except for the keys that are present."""
        state: dict[str, Any] = {}
        if "step" not in present:
            on_device = group["capturable"] or group["fused"]
            double = torch.get_default_dtype() == torch.float64 and not group["fused"]
            dtype = torch.float64 if double else torch.float32
            device = self.parameter.device if on_device else "cpu"
            state["step"] = torch.tensor(float(updates), dtype=dtype, device=device)
        missing = [key for key in adam.moment_keys(group) if key not in present]
        return state | {key: self._new_moment(held) for key in missing}

    def _new_moment(self, held: Held | None) -> Tensor:
        if held is None:
            return torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        own = local_shard(self.parameter)
        dtype = own.dtype.to_real() if own.is_complex() else own.dtype
        return held.vector(dtype, own.device).zero_()

    def moments(self, held: Held | None) -> dict[str, Tensor]:
        """The moments that exist, for the entries that have memory (None: all); see `check`."""
        values = self.values
        moments = {key: values[key] for key in self.moment_names}
        self.check(moments, held)
        return moments

    @property
    def moment_names(self) -> list[str]:
        """Keys of the moments that exist."""
        values = self.values
        return [key for key in (*adam.MOMENTS, adam.LARGEST) if key in values]

    def check(self, moments: dict[str, Tensor], held: Held | None) -> None:
        """Make sure that moments belong to the entries that have memory (None: all).

        Raises:
            PolicyError: one has another number of entries or lies on another device; it was replaced by hand.
        """
        count = self.layout.size if held is None else held.count * held.block
        device = self.parameter.device
        for key, moment in moments.items():
            size = local_shard(moment).numel() * (2 if moment.is_complex() else 1)
            if size != count or moment.device != device:
                raise PolicyError(
                    f"the optimizer's state {key!r} of a parameter of shape {tuple(self.parameter.shape)} on "
                    f"{device} has the shape {tuple(moment.shape)} and lies on {moment.device}; "
                    "load a state_dict of this model, or move the state along with it"
                )

    def pack(self, held: Held, before: Held | None) -> None:
        """Have moments of some entries alone.

        Args:
            held: whose moments to have from now on.
            before: whose moments there are; None: those of all entries.
        """
        for key, value in self.moments(before).items():
            packed = before.move(value, held) if before else held.pack(self.layout.flat(value))
            self.values[key] = packed

    def unpack(self, held: Held) -> None:
        """Have moments of all entries again, 0 where there were none."""
        self.values.update(self._dense_moments(held))

    def dense(self, held: Held | None) -> dict[str, Any]:
        """The state as the wrapped optimizer itself would hold it, 0 where there are no moments."""
        return self.values if held is None else {**self.values, **self._dense_moments(held)}

    def _dense_moments(self, held: Held) -> dict[str, Tensor]:
        return {key: self._spread(value, held) for key, value in self.moments(held).items()}

    def _spread(self, packed: Tensor, held: Held) -> Tensor:
        dense = torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        flat = self.layout.flat(dense)
        flat.copy_(held.unpack(packed))
        self.layout.write_back(flat, dense)
        return dense

    def clear_frozen_moments(self, active: Tensor | Held, block: int) -> None:
        """Zero the moments of frozen blocks of so many entries, given flags, codes or an index."""
        moments = list(entry_state(self.values, self.parameter).values())
        flats = [self.layout.flat(moment) for moment in moments]
        moves.clear_frozen([(flat, active, block) for flat in flats])
        for flat, moment in zip(flats, moments, strict=True):
            self.layout.write_back(flat, moment)

    # --- the state of any optimizer

    def begin_frozen(self, key: str, value: Tensor, codes: Tensor, block: int) -> None:
        """Have frozen entries of one tensor of the state be what they begin with, where that is known.

        Args:
            key: the tensor's name in the state.
            value: the tensor, of the parameter's shape.
            codes: one a block, below 0 where it is active.
            block: entries that a code governs.
        """
        begin = beginning(self.inner, key, self.group, self.parameter)
        if begin is None:
            return
        flat = self.layout.flat(value)
        if begin == AS_PARAMETER:
            flags = (codes < 0).view(-1, 1)
            own = self.layout.flat(self.parameter.detach()).to(flat.dtype)
            flat.copy_(torch.where(flags, flat.view(-1, block), own.view(-1, block)).view(-1))
        else:
            moves.fill_frozen(flat, codes, block, float(begin))
        self.layout.write_back(flat, value)

    def forget(self) -> bool:
        """Have no state at all; False where the optimizer's step would not make it again."""
        if not makes_state_again(self.inner):
            return False
        self.inner.state.pop(self.parameter, None)
        return True

    def forget_moments(self) -> None:
        """Have nothing that has a value for each entry."""
        for key in entry_state(self.values, self.parameter):
            del self.values[key]

    def empty(self) -> None:
        """Have everything that has a value for each entry be what it begins with."""
        empty(self.inner, self.group, self.parameter, self.values)


def bytes_of(state: Mapping[Any, Any]) -> int:
    """Bytes that an optimizer's state holds on this process; some of it may be the whole optimizer's."""
    tensors = [local_shard(value) for value in state.values() if isinstance(value, Tensor)]
    own = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    return own + sum(bytes_of(part) for part in state.values() if isinstance(part, Mapping))


def step_count(state: dict[str, Any]) -> int:
    """The step count that an optimizer's state of a parameter tells, 0 where it tells none."""
    step = state.get("step", 0)
    return int(step.item()) if isinstance(step, Tensor) else int(step)
