"""A masked parameter and the wrapped optimizer's state of it: what a new mask and a step do to both."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gradpolicy.optim import adam, moves
from gradpolicy.optim.beginnings import entry_state
from gradpolicy.optim.cohorts import Cohorts
from gradpolicy.optim.general import Keeper, needs_closure
from gradpolicy.optim.gpu import adam as gpu_adam
from gradpolicy.optim.layout import is_sharded, local_shard, own_gradient
from gradpolicy.optim.native import adam as native_adam
from gradpolicy.optim.native import moves as native
from gradpolicy.optim.packed import Held, Move, move_many
from gradpolicy.optim.parameter import FROZEN, FULL, PARTIAL, MaskedParameter
from gradpolicy.optim.state import ParameterState, step_count


class Tracked(MaskedParameter):
    """A parameter that has, or once had, a mask.

    Attributes:
        inner: the wrapped optimizer.
        stored: its state of this parameter.
        exact: whether the per-entry Adam arithmetic applies.
        frozen_state: "keep", "zero" or "drop".
        bias_correction: "entry" or "tensor".
        recipe: what made the mask, where that can be written down in a few numbers.
        differentiable: whether the optimizer's step is part of a graph.
        updates: the tensor's own step count.
        keeper: copies of frozen entries, where the wrapped optimizer's own step may change them.
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
        self.updates = step_count(inner.state.get(parameter, {}))
        super().__init__(parameter, self.updates)
        self.inner = inner
        self.stored = ParameterState(parameter, inner, self.layout)
        self.exact = exact
        self.frozen_state = frozen_state
        self.bias_correction = bias_correction
        self.recipe: Any = None
        self.differentiable = False
        self.keeper: Keeper | None = None
        self.record: native_adam.Record | gpu_adam.Record | None = None
        self._applied_as: tuple[str, bool] | None = None
        self._views: dict[str, tuple[Tensor, Tensor]] = {}
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __getstate__(self) -> dict[str, Any]:
        # Addresses are no good to a copy.
        return {**self.__dict__, "record": None, "_views": {}}

    @property
    def state(self) -> dict[str, Any]:
        """The wrapped optimizer's state of this parameter; empty before its first update."""
        return self.inner.state.get(self.parameter, {})

    @property
    def forgets(self) -> bool:
        """Whether freezing empties an entry's state."""
        return self.frozen_state != "keep"

    @property
    def holds_active_alone(self) -> bool:
        """Whether only active entries shall have memory."""
        return self.kind is PARTIAL and self.exact and self.frozen_state == "drop"

    @property
    def is_settled(self) -> bool:
        """Whether the mask was put in force under the settings there are."""
        return self._applied_as == (self.frozen_state, self.rests)

    def follow(self) -> bool:
        """Follow the parameter to its device; begin anew where its state is gone. See `MaskedParameter`."""
        moved = super().follow()
        if moved:
            self.forget_addresses()
            self.keeper = None
            self._ready_keeper()
        # Updates of other processes' parts leave no state here; else somebody has removed it.
        counted = self.cohorts.any_age or (self.updates > 0 and not is_sharded(self.parameter))
        if self.exact and counted and not self.state:
            self.updates = 0
            self.cohorts.restart()
        return moved

    # --- a new mask

    def set_mask(self, mask: Tensor | None) -> None:
        """Take a mask that fits; see `check_mask`."""
        self.follow()
        mask = self.take_shape(mask)
        if not self.layout.size:
            self.take_empty_part(mask)
            if self.rests and self.forgets:
                self._empty()
            return
        before = self.kind
        flags, block, seen = self.take_flags(mask)
        unchanged = self.is_settled and self.kind is before
        if unchanged and (self.kind is not PARTIAL or self.is_in_force(flags, block, seen.same)):
            return
        self._applied_as = (self.frozen_state, self.rests)
        if self._repack(flags, block, seen):
            return
        self.forget_addresses()
        old = self.hold_all()
        self.cohorts.change(flags, block, self.forgets, moves.recode)
        self._move_state(old)
        self._ready_keeper()

    def _repack(self, flags: Tensor, block: int, seen: native.Survey) -> bool:
        """From held entries to other held entries directly; False where that is not the case."""
        move = self.move_to(flags, seen) if block == 1 and self.moves_entries else None
        if move is None:
            return False
        self.take_moved(move, *move_many([move]))
        return True

    @property
    def moves_entries(self) -> bool:
        """Whether entries that have memory make room for others directly."""
        entries = self.held is not None and self.held.block == 1 and self.cohorts.paused in ([], [0])
        return entries and self.holds_active_alone

    def move_to(self, flags: Tensor, seen: native.Survey) -> Move | None:
        """What to move so that these entries alone have memory; None where codes of a byte are used up."""
        assert self.held is not None
        moments = self.stored.moments(self.held)
        code = self.cohorts.thaw_code()
        if code is None:
            return None
        vectors = [(self.cohorts.codes, code), *((moment, 0) for moment in moments.values())]
        return self.held, Held(flags, 1, seen.count, seen.index), vectors

    def take_moved(self, move: Move, moved: list[Tensor]) -> None:
        """Take what was moved."""
        self.forget_addresses()
        _, self.held, _ = move
        self.active_entries = self.held.count
        self.cohorts.codes, *moments = moved
        self.state.update(zip(self.stored.moment_names, moments, strict=True))
        self.cohorts.paused = [0]

    def _move_state(self, old: Held | None) -> None:
        """Bring the optimizer's state in line with new flags; `old`: which entries had moments so far."""
        packs = self.holds_active_alone
        if packs:
            self.stored.pack(self.hold_active(), old)
        elif old is not None:
            self.stored.unpack(old)
        if self.kind is FROZEN and self.forgets:
            self._empty()
        elif self.kind is PARTIAL and self.forgets and not packs:
            self._empty_frozen()
        self._count_by_age()

    def _empty_frozen(self) -> None:
        if self.exact:
            self.stored.clear_frozen_moments(*self.active_flags())
            return
        for key, value in entry_state(self.state, self.parameter).items():
            self.stored.begin_frozen(key, value, self.cohorts.codes, self.cohorts.block)

    def _empty(self) -> None:
        """Empty the state of a tensor that is frozen as a whole."""
        if not self.state:
            return
        # Ages are an entry's; an inexact optimizer's count is the whole tensor's, on every process alike.
        restart = self.bias_correction == "entry" and (self.exact or self.rests)
        drops = self.frozen_state == "drop"
        gone = restart and (drops or not self.exact) and self.stored.forget()
        if not gone and drops and self.exact:
            self.stored.forget_moments()
        elif not gone:
            self.stored.empty()
        if restart:
            self._set_step_count(0)

    def _count_by_age(self) -> None:
        """Have the wrapped optimizer's own step count from the age, where all entries share one."""
        if self.exact and self.cohorts.uniform and self.kind is FULL and self.bias_correction == "entry":
            self._set_step_count(self.cohorts.slots.active[0])

    def _set_step_count(self, count: int) -> None:
        self.stored.set_step_count(count)
        self.updates = count

    def _ready_keeper(self) -> None:
        if self.exact or self.kind is FULL or (self.waits and not needs_closure(self.inner)):
            self.keeper = None
            return
        self.keeper = self.keeper or Keeper(self.layout)
        self.keeper.take_mask(self.cohorts.active(), self.cohorts.block)

    def forget_addresses(self) -> None:
        """Have the next update find out anew where all lies."""
        self._views.clear()
        self.forget_record()

    def forget_record(self) -> None:
        """Have the next update find out anew what it has to do."""
        if self.record is not None:
            self.record.forget()
            self.record = None

    def flat_moments(self) -> list[Tensor]:
        """The moments there are, dense, as flat vectors; see `write_back`."""
        return [self._flat(key, moment) for key, moment in self.stored.moments(None).items()]

    # --- taking flags, ages and state from elsewhere

    def adopt_state(self) -> None:
        """Take the optimizer's state as it now stands, dense and of one age, under the present mask."""
        mask = None if self.mask_shape is None else self.mask()
        self.held, self.updates = None, step_count(self.state)
        self.forget_addresses()
        self.cohorts = Cohorts(self.layout.size, self.updates, local_shard(self.parameter).device)
        self._applied_as = None
        self.set_mask(mask)

    def adopt_cohorts(self, cohorts: Cohorts) -> None:
        """Take other flags and ages, those of the mask that `take_flags` has read; the state is dense."""
        self.cohorts = cohorts
        if self.holds_active_alone:
            self.stored.pack(self.hold_active(), None)
        elif self.kind is FROZEN and (self.frozen_state == "drop" or (self.forgets and not self.exact)):
            self._empty()
        # Of processes whose parts have different ages, a checkpoint holds the step count of one.
        self._count_by_age()
        self._ready_keeper()
        self._applied_as = (self.frozen_state, self.rests)

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
        if not self.exact or adam.MOMENTS[0] in self.state:
            return
        self.follow()
        # A state of a step count alone, too, comes of moments that were dropped.
        if self.updates or self.state:
            self.stored.begin(self.stored.group, self.updates, self.held)

    def save_frozen(self) -> None:
        """Before the wrapped optimizer steps: zero frozen entries' gradients, remember what it may change."""
        assert self.keeper is not None
        self.follow()
        if self.parameter.grad is not None:
            gradient = own_gradient(self.parameter, self.parameter.grad)
            flat = self.layout.flat(gradient)
            moves.fill_frozen(flat, *self.active_flags(), 0.0)
            self.layout.write_back(flat, gradient)
        self.keeper.saved.clear()
        self.keeper.save("", self.parameter)
        if not self.forgets:
            for key, value in entry_state(self.state, self.parameter).items():
                self.keeper.save(key, value)

    def restore_frozen(self) -> None:
        """After the wrapped optimizer has stepped: put frozen entries and their state back."""
        assert self.keeper is not None
        self.keeper.restore("", self.parameter)
        for key, value in entry_state(self.state, self.parameter).items():
            if key in self.keeper.saved:
                self.keeper.restore(key, value)
            else:
                self.stored.begin_frozen(key, value, self.cohorts.codes, self.cohorts.block)

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
        self.follow()
        state = self.stored.begin(group, self.updates, self.held)
        slots = self.cohorts.slots
        ages = (self.updates,) if self.bias_correction == "tensor" else slots.active
        keys = adam.moment_keys(group)
        self.stored.check({key: state[key] for key in keys}, self.held)
        moments = [state[key] if self.held else self._flat(key, state[key]) for key in keys]
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
            self.active_blocks(),
            self.active_entries / self.layout.size,
        )

    def _flat(self, key: str, tensor: Tensor) -> Tensor:
        """`Layout.flat`, remembered while the tensor stays in place; else for `write_back`."""
        source, flat = self._views.get(key, (None, tensor))
        if source is tensor and flat.data_ptr() == tensor.data_ptr():
            return flat
        flat = self.layout.flat(tensor)
        if not is_sharded(tensor) and flat.data_ptr() == tensor.data_ptr():
            self._views[key] = (tensor, flat)
        else:
            self._copies.append((flat, tensor))
        return flat

    def write_back(self) -> None:
        """Take flat vectors where they are copies."""
        for flat, tensor in self._copies:
            self.layout.write_back(flat, tensor)
        self._copies.clear()

    def finish(self) -> None:
        """Take a job's results where they were not written in place, and count the update."""
        self.write_back()
        self.count_update()
