"""Everything known about one masked parameter: its flags, its ages, and where its moments lie."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import adam, moves
from gradpolicy.optim.beginnings import (
    AS_PARAMETER,
    beginning,
    empty,
    entry_state,
    is_torchs_own,
    makes_state_again,
    state_of_a_first_step,
)
from gradpolicy.optim.cohorts import Cohorts, Slots, chunk, repeat
from gradpolicy.optim.general import Keeper
from gradpolicy.optim.gpu import adam as gpu_adam
from gradpolicy.optim.layout import (
    Layout,
    as_sharded,
    coarse_mask,
    has_one_value,
    is_sharded,
    local_mask,
    local_shard,
)
from gradpolicy.optim.native import adam as native_adam
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.packed import Held

FROZEN, PARTIAL, FULL = "frozen", "partial", "full"


class Tracked:
    """A parameter that has, or once had, a mask.

    Attributes:
        parameter: the parameter.
        inner: the wrapped optimizer, whose `state` holds the moments.
        exact: whether the per-entry Adam arithmetic applies.
        frozen_state: "keep", "zero" or "drop".
        bias_correction: "entry" or "tensor".
        cohorts: activity and ages; its codes are packed while `held` is set.
        held: which blocks have moments, under "drop" while some are frozen.
        mask_shape: shape of the mask as it was set; None after a mask of None.
        recipe: what made the mask, where that can be written down in a few numbers.
        kind: whether none, some or all entries are active.
        differentiable: whether the optimizer's step is part of a graph.
        rests: whether no entry of the whole tensor is active, on any process.
        updates: the tensor's own step count.
        record: the update as a kernel reads it, while the masks stay.
    """

    def __init__(
        self,
        parameter: Tensor,
        inner: torch.optim.Optimizer,
        exact: bool,
        frozen_state: str,
        bias_correction: str,
    ) -> None:
        self.parameter = parameter
        self.inner = inner
        self.exact = exact
        self.frozen_state = frozen_state
        self.bias_correction = bias_correction
        self.layout = Layout.of(parameter)
        self.mask_shape: tuple[int, ...] | None = None
        self.recipe: Any = None
        self.held: Held | None = None
        self.kind, self.rests = FULL, False
        self.differentiable = False
        self.active_entries = self.layout.size
        self.keeper: Keeper | None = None
        self.empty_part: Tensor | None = None
        self.applied_as: tuple[str, bool] | None = None
        self.views: dict[str, tuple[Tensor, Tensor]] = {}
        self.copies: list[tuple[Tensor, Tensor]] = []
        self.record: native_adam.Record | gpu_adam.Record | None = None
        self.updates = _steps(inner.state.get(parameter, {}))
        self.cohorts = Cohorts(self.layout.size, self.updates, local_shard(parameter).device)

    def __getstate__(self) -> dict[str, Any]:
        # Addresses are no good to a copy.
        return {**self.__dict__, "record": None, "views": {}}

    @property
    def forgets(self) -> bool:
        """Whether freezing empties an entry's state."""
        return self.frozen_state != "keep"

    @property
    def state(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this parameter; empty before its first update."""
        return self.inner.state.get(self.parameter, {})

    # --- masks and ages

    def set_mask(self, mask: Tensor | None) -> None:
        """Take a mask that fits; see `check_mask`."""
        self.mask_shape = None if mask is None else tuple(mask.shape)
        if mask is None:
            mask = torch.ones((1,) * self.parameter.dim(), dtype=torch.bool)
        if is_sharded(self.parameter):
            self.rests = self._rests_under(mask)
        if not self.layout.size:
            self.empty_part = local_mask(mask, self.parameter)
            self.kind = FROZEN if self.rests else FULL
            if self.rests and self.forgets:
                self._empty_whole()
            return
        before = self.kind
        flags, block, seen = self._take_flags(mask)
        unchanged = self.applied_as == (self.frozen_state, self.rests) and self.kind is before
        if unchanged and (self.kind is not PARTIAL or self._is_in_force(flags, block, seen.same)):
            return
        self.applied_as = (self.frozen_state, self.rests)
        old = self.held
        self._forget_addresses()
        if self._repack(flags, block, seen):
            return
        self._unpack_codes()
        self.cohorts.change(flags, block, self.forgets, moves.recode)
        self._move_state(old)
        self._ready_keeper()

    def _is_in_force(self, flags: Tensor, block: int, same: bool | None) -> bool:
        """Whether these flags change nothing: then no cohort is made, and a resumed run makes none either.

        Args:
            flags: some of which are set, as were some before.
            block: entries that a flag governs.
            same: what is known already.
        """
        if same is not None:
            return same
        own = self.cohorts.block
        if block == own == 1:
            parts = self._active_parts()
            return all(torch.equal(flags[part], active) for part, active in parts)
        finest = min(block, own)
        both = [repeat(flags, block // finest), repeat(self._active(), own // finest)]
        return torch.equal(*both)

    def _active_parts(self) -> Iterator[tuple[slice, Tensor]]:
        """Flags of single entries a stretch at a time: masks that differ mostly do so in the first one."""
        if self.held is not None:
            yield from self.held.flag_parts()
            return
        codes = self.cohorts.codes
        count = chunk(codes.device)
        for start in range(0, codes.numel(), count):
            part = slice(start, start + count)
            yield part, codes[part] < 0

    def _active(self) -> Tensor:
        """One flag a block."""
        return self.cohorts.active() if self.held is None else self.held.flags()

    def _take_flags(self, mask: Tensor) -> tuple[Tensor, int, native.Survey]:
        """One flag a block, a single one where all agree; the entries that it governs; and what was seen."""
        flags, block = self.layout.blocks_of(mask, self.parameter)
        seen = moves.survey(flags, self.cohorts.codes, self.held)
        self.active_entries = seen.count * block
        self.kind = FULL if seen.count == flags.numel() else PARTIAL if seen.count else FROZEN
        if not is_sharded(self.parameter):
            self.rests = self.kind is FROZEN
        return (flags, block, seen) if self.kind is PARTIAL else (flags[:1], self.layout.size, seen)

    def _rests_under(self, mask: Tensor) -> bool:
        """Whether a mask freezes the whole tensor; of a sharded mask every process must ask."""
        if is_sharded(mask):
            sharded: Any = mask.int().sum()
            return not int(sharded.full_tensor())
        return native.count(mask.reshape(-1)) == 0

    def _ready_keeper(self) -> None:
        if self.exact or self.kind is FULL or self.waits:
            self.keeper = None
            return
        self.keeper = self.keeper or Keeper(self.layout)
        self.keeper.take_mask(self.cohorts.active(), self.cohorts.block)

    def mask(self) -> Tensor:
        """The mask as it was set."""
        if self.mask_shape is None:
            return torch.ones((), dtype=torch.bool, device=self.parameter.device).expand(self.parameter.shape)
        if self.empty_part is not None:
            return as_sharded(self.empty_part, self.parameter, self.mask_shape)
        flags = self._blockwise(self.cohorts.active())
        return self.layout.logical(flags, self.cohorts.block, self.parameter, self.mask_shape)

    def ages(self) -> Tensor:
        """Each entry's age, as coarse as the masks were."""
        return self.layout.logical(self._blockwise(self.cohorts.ages()), self.cohorts.block, self.parameter)

    def entrywise(self) -> tuple[Tensor, Tensor]:
        """A flag and an age (int32) for each entry, in the parameter's shape and sharded as it is."""
        shape, block = self.parameter.shape, self.cohorts.block
        active, ages = self._blockwise(self.cohorts.active()), self._blockwise(self.cohorts.ages())
        mask = self.layout.logical(active, block, self.parameter, shape)
        return mask, self.layout.logical(ages.int(), block, self.parameter, shape)

    @property
    def drops_gradient(self) -> bool:
        """Whether the whole gradient goes; of a sharded parameter on every process alike."""
        if not is_sharded(self.parameter):
            return self.kind is FROZEN
        one_flag = self.mask_shape is not None and has_one_value(self.mask_shape, self.parameter)
        if self.empty_part is not None:
            return one_flag and not bool(self.empty_part)
        return one_flag and self.kind is FROZEN

    def active_flags(self) -> tuple[Tensor | Held, int]:
        """Codes, or the index of active blocks, and how many entries a block has."""
        return self.cohorts.codes if self.held is None else self.held, self.cohorts.block

    def _blockwise(self, values: Tensor) -> Tensor:
        return values if self.held is None else self.held.unpack(values, 1)

    # --- where the moments lie

    def _forget_addresses(self) -> None:
        self.views.clear()
        self.record = None

    def begin(self, group: dict[str, Any]) -> dict[str, Any]:
        """The state for an exact update, made where it is missing."""
        state = self.inner.state[self.parameter]
        for key, value in self._first_state(group, set(state)).items():
            state[key] = value
        return state

    def _first_state(self, group: dict[str, Any], present: set[str], dense: bool = False) -> dict[str, Any]:
        """What torch's Adam would begin with, less what is present."""
        state: dict[str, Any] = {}
        if "step" not in present:
            on_device = group["capturable"] or group["fused"]
            double = torch.get_default_dtype() == torch.float64 and not group["fused"]
            dtype = torch.float64 if double else torch.float32
            device = self.parameter.device if on_device else "cpu"
            state["step"] = torch.tensor(float(self.updates), dtype=dtype, device=device)
        return state | {key: self._new_moment(dense) for key in adam.moment_keys(group) if key not in present}

    def _new_moment(self, dense: bool) -> Tensor:
        if dense or self.held is None:
            return torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        own = local_shard(self.parameter)
        dtype = own.dtype.to_real() if own.is_complex() else own.dtype
        return self.held.vector(dtype, own.device).zero_()

    def dense_state(self) -> dict[str, Any]:
        """The state as the wrapped optimizer itself would hold it: 0 where nothing is held."""
        if self.held is None:
            return self.state
        return {key: self._spread(value) if key != "step" else value for key, value in self.state.items()}

    def _spread(self, packed: Tensor) -> Tensor:
        assert self.held is not None
        dense = torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        flat = self.layout.flat(dense)
        flat.copy_(self.held.unpack(packed))
        self.layout.write_back(flat, dense)
        return dense

    def _unpack_codes(self) -> None:
        if self.held is not None:
            self.cohorts.codes = self.held.unpack(self.cohorts.codes, 1)

    def _pack(self, old: Held | None = None) -> None:
        """Hold memory for active blocks alone; `old` tells what the state holds now, None: everything."""
        block = self.cohorts.block
        held = self.held = Held(self.cohorts.codes, block, self.active_entries // block)
        self.cohorts.codes = held.pack(self.cohorts.codes, 1)
        for key, value in self.state.items():
            if key != "step":
                self.state[key] = old.move(value, held) if old else held.pack(self.layout.flat(value))

    def _repack(self, flags: Tensor, block: int, seen: native.Survey) -> bool:
        """From held entries to other held entries directly; False where that is not the case."""
        old = self.held
        entries = old is not None and old.block == block == 1 and self.cohorts.paused in ([], [0])
        if old is None or not entries or self.kind is not PARTIAL or self.frozen_state != "drop":
            return False
        code = self.cohorts.thaw_code()
        if code is None:
            return False
        self.held = held = Held(flags, block, seen.count, seen.index)
        keys = [key for key in self.state if key != "step"]
        vectors = [(self.cohorts.codes, code), *((self.state[key], 0) for key in keys)]
        self.cohorts.codes, *moments = old.move_together(vectors, held)
        self.state.update(zip(keys, moments, strict=True))
        self.cohorts.paused = [0]
        return True

    def _move_state(self, old: Held | None) -> None:
        """Bring the optimizer's state in line with new flags."""
        packs = self.kind is PARTIAL and self.exact and self.frozen_state == "drop"
        if packs:
            self._pack(old)
        elif old is not None:
            for key, value in self.state.items():
                if key != "step":
                    self.state[key] = self._spread(value)
            self.held = None
        if self.kind is FROZEN and self.forgets:
            self._empty_whole()
        elif self.kind is PARTIAL and self.forgets and not packs:
            self._empty_frozen()
        self._set_step_by_age()

    def _empty_frozen(self) -> None:
        entries = entry_state(self.state, self.parameter)
        if not self.exact:
            for key, value in entries.items():
                self._begin_frozen(key, value)
            return
        flats = [self.layout.flat(value) for value in entries.values()]
        moves.clear_frozen([(flat, *self.active_flags()) for flat in flats])
        for flat, value in zip(flats, entries.values(), strict=True):
            self.layout.write_back(flat, value)

    def _begin_frozen(self, key: str, value: Tensor) -> None:
        """Have frozen entries of a state be what it begins with."""
        begin = beginning(self.inner, key, self._group(), self.parameter)
        if begin is None:
            return
        active, block = self.cohorts.codes, self.cohorts.block
        flat = self.layout.flat(value)
        if begin == AS_PARAMETER:
            flags = (active < 0).view(-1, 1)
            own = self.layout.flat(self.parameter.detach()).to(flat.dtype)
            flat.copy_(torch.where(flags, flat.view(-1, block), own.view(-1, block)).view(-1))
        else:
            moves.fill_frozen(flat, active, block, float(begin))
        self.layout.write_back(flat, value)

    def _empty_whole(self) -> None:
        """Empty the state of a tensor that is frozen as a whole."""
        state = self.inner.state.get(self.parameter)
        if not state:
            return
        # Ages are an entry's; an inexact optimizer's count is the whole tensor's, on every process alike.
        restart = self.bias_correction == "entry" and (self.exact or self.rests)
        if restart and (self.frozen_state == "drop" or not self.exact) and makes_state_again(self.inner):
            self.inner.state.pop(self.parameter)
            self.updates = 0
            return
        if self.frozen_state == "drop" and self.exact:
            for key in entry_state(state, self.parameter):
                del state[key]
        else:
            empty(self.inner, self._group(), self.parameter, state)
        if restart:
            self._set_step(0)

    def _set_step_by_age(self) -> None:
        """Have the wrapped optimizer's own step count from the age, where all entries share one."""
        if self.exact and self.cohorts.uniform and self.kind is FULL and self.bias_correction == "entry":
            self._set_step(self.cohorts.slots.active[0])

    def _set_step(self, count: int) -> None:
        if isinstance(self.state.get("step"), Tensor):
            self.state["step"].fill_(count)
        self.updates = count

    def _group(self) -> dict[str, Any]:
        return next(g for g in self.inner.param_groups if any(p is self.parameter for p in g["params"]))

    # --- saving and loading

    def slot_numbers(self) -> Tensor:
        """Each entry's slot, as coarse as the masks were."""
        codes = self._blockwise(self.cohorts.codes)
        slots = codes & torch.iinfo(codes.dtype).max
        return self.layout.logical(slots, self.cohorts.block, self.parameter).clone()

    def state_to_save(self, begun: bool) -> dict[str, Any]:
        """The dense state; where updates have begun but not here, the state that an exact one begins with."""
        state = self.dense_state()
        group = self._group()
        if self.exact and begun and not all(key in state for key in adam.moment_keys(group)):
            state = {**self._first_state(group, set(state), dense=True), **state}
        elif begun and not state and (is_sharded(self.parameter) or is_torchs_own(self.inner)):
            # A checkpoint has one form, whatever rests, as torch's own demand; restoring empties it again.
            state = state_of_a_first_step(self.inner, self.parameter, group)
        return state

    def restore(self, mask: Tensor | None, slots: Slots, numbers: Tensor | None, updates: int) -> None:
        """Take saved flags and ages; the optimizer's state is loaded, and dense.

        Args:
            mask: the mask, one that fits; None: all active.
            slots: the ages that slots stand for.
            numbers: each entry's slot; None where there is only slot 0.
            updates: the tensor's own step count.
        """
        self.mask_shape = None if mask is None else tuple(mask.shape)
        self.held, self.updates = None, updates
        self._forget_addresses()
        if not self.layout.size:
            return
        mask = torch.ones((1,) * self.parameter.dim(), dtype=torch.bool) if mask is None else mask
        if is_sharded(self.parameter):
            self.rests = self._rests_under(mask)
        flags, block, _ = self._take_flags(mask)
        if numbers is None:
            values, values_block = torch.zeros(1, dtype=torch.int8, device=flags.device), self.layout.size
        else:
            values, values_block = self.layout.blocks_of(numbers, self.parameter)
        fine = min(block, values_block)
        if values_block > fine and values.numel() > 1:
            values = repeat(values, values_block // fine)
        if block > fine and flags.numel() > 1:
            flags = repeat(flags, block // fine)
        codes = torch.where(flags, values + torch.iinfo(values.dtype).min, values)
        self.cohorts = Cohorts.restored(codes, self.layout.size // codes.numel(), slots)
        self._hold_what_was_restored()

    def _hold_what_was_restored(self) -> None:
        """Bring the loaded, dense state in the form that the masks ask for."""
        if self.kind is PARTIAL and self.exact and self.frozen_state == "drop":
            self._pack()
        elif self.kind is FROZEN and (self.frozen_state == "drop" or (self.forgets and not self.exact)):
            self._empty_whole()
        # Of processes whose parts have different ages, the checkpoint holds the step count of one.
        self._set_step_by_age()
        self._ready_keeper()
        self.applied_as = (self.frozen_state, self.rests)

    def restore_parts(self, mask: Tensor, ages: Tensor, shape: tuple[int, ...] | None, updates: int) -> None:
        """Take flags and ages of each entry, of which this process keeps its part.

        Args:
            mask: bool, the parameter's shape; as sharded as the parameter, or plain.
            ages: whole numbers, the parameter's shape.
            shape: shape of the mask as it was set.
            updates: the tensor's own step count.
        """
        self.held, self.updates = None, updates
        self._forget_addresses()
        coarse = None if shape is None else coarse_mask(mask, self.parameter, shape)
        if not self.layout.size:
            # A process without entries too has its part of the mask.
            self.set_mask(coarse)
        else:
            self.mask_shape = shape
            self.rests = coarse is not None and self._rests_under(coarse)
            flags, _ = self.layout.blocks_of(mask, self.parameter)
            values, numbers = torch.unique(
                self.layout.blocks_of(ages, self.parameter)[0], return_inverse=True
            )
            slots = Slots(tuple(values.tolist()), tuple(values.tolist()))
            block = self._coarsest(numbers, flags)
            numbers = numbers.view(-1, block)[:, 0].to(slots.dtype)
            lowest = torch.iinfo(slots.dtype).min
            codes = torch.where(flags.view(-1, block)[:, 0], numbers + lowest, numbers)
            self.cohorts = Cohorts.restored(codes, block, slots)
            self._take_flags(mask)
            self._hold_what_was_restored()

    def _coarsest(self, *vectors: Tensor) -> int:
        """The largest block of entries within which every vector has one value."""
        physical = self.layout.physical_shape
        for leading in range(len(physical) + 1):
            block = prod(physical[leading:])
            rows = [vector.view(-1, block) for vector in vectors]
            if all(bool((row == row[:, :1]).all()) for row in rows):
                return block
        return 1

    def adopt_state(self) -> None:
        """Take the optimizer's state as it now stands, dense and of one age, under the present mask."""
        mask = None if self.mask_shape is None else self.mask()
        self.held, self.updates = None, _steps(self.state)
        self._forget_addresses()
        self.cohorts = Cohorts(self.layout.size, self.updates, local_shard(self.parameter).device)
        self.applied_as = None
        self.set_mask(mask)

    def restore_state(self) -> None:
        """After a step of an optimizer without an exact path: put frozen entries' state back."""
        assert self.keeper is not None
        for key, value in entry_state(self.state, self.parameter).items():
            if key in self.keeper.saved:
                self.keeper.restore(key, value)
            else:
                self._begin_frozen(key, value)

    # --- updates

    @property
    def inner_steps_it(self) -> bool:
        """Whether the wrapped optimizer's own update is right as it stands."""
        if self.kind is not FULL:
            return False
        return not self.exact or self.bias_correction == "tensor" or self.cohorts.uniform

    @property
    def waits(self) -> bool:
        """Whether a step passes the tensor by.

        Not where an optimizer without an exact path updates parts on other processes: what that counts for
        the whole tensor goes on here too, and frozen entries are put back.
        """
        return self.kind is FROZEN and (self.rests or self.exact)

    @property
    def steps_exactly(self) -> bool:
        """Whether an update is ours to do, entry by entry."""
        return self.exact and self.kind is not FROZEN and not self.inner_steps_it

    def complete_state(self) -> None:
        """Make moments again that were dropped, where the wrapped optimizer would not."""
        # A state of a step count alone, too, comes of moments that were dropped.
        if self.exact and (self.updates or self.state) and adam.MOMENTS[0] not in self.state:
            self.begin(self._group())

    def count_update_elsewhere(self) -> None:
        """Note that other processes have updated their parts of the tensor."""
        self.updates += 1
        if isinstance(self.state.get("step"), Tensor):
            self.state["step"] += 1

    def count_update(self) -> None:
        """Note that an update took place."""
        self.updates += 1
        self.cohorts.tick()

    def job(self, group: dict[str, Any], settings: adam.Settings, gradient: Tensor) -> adam.Job:
        """The exact update of this parameter."""
        state = self.begin(group)
        slots = self.cohorts.slots
        ages = (self.updates,) if self.bias_correction == "tensor" else slots.active
        moments = [state[key] for key in adam.moment_keys(group)]
        if self.held is None:
            moments = [self._flat(key, state[key]) for key in adam.moment_keys(group)]
        return adam.Job(
            self._flat("", self.parameter),
            self.layout.flat(gradient),
            moments,
            self.cohorts.codes,
            self.cohorts.block,
            ages,
            settings,
            self.held,
            slots.most,
            self._rows(),
            self.active_entries / self.layout.size,
        )

    def _rows(self) -> Tensor | None:
        """The blocks to update, where they are more than one entry."""
        if self.cohorts.block == 1:
            return None
        return self.cohorts.active_blocks() if self.held is None else self.held.rows

    def _flat(self, key: str, tensor: Tensor) -> Tensor:
        """`Layout.flat`, remembered while the tensor stays in place; else written back by `finish`."""
        source, flat = self.views.get(key, (None, tensor))
        if source is tensor and flat.data_ptr() == tensor.data_ptr():
            return flat
        flat = self.layout.flat(tensor)
        if not is_sharded(tensor) and flat.data_ptr() == tensor.data_ptr():
            self.views[key] = (tensor, flat)
        else:
            self.copies.append((flat, tensor))
        return flat

    def finish(self) -> None:
        """Take a job's results where they were not written in place, and count the update."""
        for flat, tensor in self.copies:
            self.layout.write_back(flat, tensor)
        self.copies.clear()
        self.count_update()


def _steps(state: dict[str, Any]) -> int:
    """The step count that an optimizer's state tells, 0 where it tells none."""
    step = state.get("step", 0)
    return int(step.item()) if isinstance(step, Tensor) else int(step)
