"""One parameter of a MaskedOptimizer: its mask, ages and state, and how a step treats it."""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import entry_ages
from gradpolicy.optim.frozen_copies import FrozenCopies
from gradpolicy.optim.initial_state import makes_state_again, needs_closure
from gradpolicy.optim.kernels import EntryUpdate, select
from gradpolicy.optim.layout import Layout, as_sharded, has_one_value, own_gradient
from gradpolicy.optim.update_rules import Group, UpdateRule
from gradpolicy.tensors.sharding import is_sharded, local_shard


class Mode(Enum):
    """How a step treats a parameter."""

    PLAIN = "the wrapped optimizer's own update is right as it stands"
    MASKED = "the update rule moves the active entries"
    RESTORED = "the wrapped optimizer updates it, then frozen entries are put back"
    FROZEN = "nothing touches it"
    ELSEWHERE = "it is frozen on this process and trains on others"


class MaskedParameter:
    """A parameter that has, or once had, a mask.

    Args:
        parameter: the parameter; every entry starts active.
        optimizer: the wrapped optimizer.
        rule: how the optimizer moves one entry; None where that is not known.
        place: the number of its param group, and its position there.
        frozen_state: "keep", "zero" or "drop".
        bias_correction: "entry" or "tensor".

    Attributes:
        parameter, optimizer, rule, frozen_state, bias_correction: as given.
        differentiable: whether the optimizer's step is part of a graph.
        layout: the order of this process's entries in memory.
        block: consecutive entries that share an age.
        ages: signed ages of all blocks, or of those in `index`.
        index: which blocks have ages and state, a bit each; None: all.
        uncounted: updates of active entries that `ages` do not tell yet.
        oldest: no entry's age is above this.
        updates: how many updates the tensor as a whole has had.
        active_entries: how many of this process's entries are active.
        mask_shape: shape of the mask as it was set; None after a mask of None.
        empty_mask: this process's part of the mask, where it holds no entry; None elsewhere.
        frozen_everywhere: whether no entry of the whole tensor is active, on any process.
        dropped: whether a mask removed the state of each entry, and no update has made it again.
        copies: of frozen entries, where the wrapped optimizer's own step may change them.
    """

    def __init__(
        self,
        parameter: Tensor,
        optimizer: torch.optim.Optimizer,
        rule: UpdateRule | None,
        place: tuple[int, int],
        frozen_state: str,
        bias_correction: str,
    ) -> None:
        self.parameter, self.optimizer, self.rule = parameter, optimizer, rule
        self.frozen_state, self.bias_correction = frozen_state, bias_correction
        self._place = place
        self.differentiable = False
        self.shape = parameter.shape
        self.layout = Layout.of(parameter)
        self.mask_shape: tuple[int, ...] | None = None
        self.empty_mask: Tensor | None = None
        self.copies: FrozenCopies | None = None
        self._flat: dict[str, tuple[Tensor, Tensor]] = {}
        self._unwritten: list[tuple[Tensor, Tensor]] = []
        self.begin(self._updates_of_state())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_flat": {}}

    def begin(self, updates: int) -> None:
        """Makes every entry active and as old as its tensor."""
        self.updates = self.oldest = updates
        self.uncounted = 0
        self.index: Tensor | None = None
        self.block = max(self.layout.size, 1)
        self.ages = entry_ages.all_active(updates, local_shard(self.parameter).device)
        self.active_entries = self.layout.size
        self.frozen_everywhere = self.dropped = False
        self._flat.clear()

    # --- what it is

    @property
    def group(self) -> Group:
        """The parameter's param group."""
        groups, (index, position) = self.optimizer.param_groups, self._place
        members = groups[index]["params"] if index < len(groups) else ()
        if position >= len(members) or members[position] is not self.parameter:
            places = [(i, j) for i, group in enumerate(groups) for j, _ in enumerate(group["params"])]
            self._place = next(p for p in places if groups[p[0]]["params"][p[1]] is self.parameter)
        return groups[self._place[0]]

    @property
    def state(self) -> dict[str, Any]:
        """The optimizer's state of this parameter; empty before its first update."""
        return self.optimizer.state.get(self.parameter, {})

    @property
    def forgets(self) -> bool:
        """Whether an entry that freezes loses its state."""
        return self.frozen_state != "keep"

    @property
    def is_full(self) -> bool:
        """Whether all of this process's entries are active."""
        return self.active_entries == self.layout.size and not self.frozen_everywhere

    @property
    def mode(self) -> Mode:
        """How a step treats the parameter."""
        if self.frozen_everywhere:
            return Mode.FROZEN
        if self.is_full:
            exact = self.rule is not None and self.bias_correction == "entry" and self.ages.numel() > 1
            return Mode.MASKED if exact else Mode.PLAIN
        if self.rule is None:
            return Mode.RESTORED
        return Mode.MASKED if self.active_entries else Mode.ELSEWHERE

    @property
    def drops_gradient(self) -> bool:
        """Whether the whole gradient goes; of a sharded parameter on every process alike."""
        if not is_sharded(self.parameter):
            return self.frozen_everywhere
        one_flag = self.mask_shape is not None and has_one_value(self.mask_shape, self.parameter)
        if self.empty_mask is not None:
            return one_flag and not bool(self.empty_mask)
        return one_flag and not self.active_entries

    @property
    def bytes(self) -> int:
        """Memory of ages and index."""
        return self.ages.nbytes + (0 if self.index is None else self.index.nbytes)

    def uncounted_ages(self) -> Tensor:
        """Signed ages of all blocks, with room for the updates that are still to be counted in."""
        self._make_room()
        return self._of_all_blocks(self.ages, 1, -1)

    def packed_ages(self) -> Tensor:
        """The ages of the blocks in the index, all of which are active, with every update counted in."""
        self._make_room()
        if self.uncounted:
            self.ages += self.uncounted
            self.uncounted = 0
        return self.ages

    def _make_room(self) -> None:
        """Stores ages in as many bits as the oldest entry needs."""
        if self.ages.dtype == entry_ages.NARROW and self.oldest >= entry_ages.LAST_NARROW:
            self.ages = self.ages.to(entry_ages.WIDE)

    def dense_ages(self) -> Tensor:
        """Signed ages of all blocks."""
        return entry_ages.count(self.uncounted_ages(), self.uncounted)

    def _of_all_blocks(self, values: Tensor, per_block: int, fill: float) -> Tensor:
        """Values that follow the index, with a number for the blocks that it lacks."""
        if self.index is None:
            return values
        blocks = self.layout.size // self.block
        kernels = select(values.device, values.dtype)
        return kernels.repack(values, self.index, None, per_block, blocks, fill)

    def mask(self) -> Tensor:
        """The mask as it was set."""
        self.follow()
        if self.mask_shape is None:
            return torch.ones((), dtype=torch.bool, device=self.parameter.device).expand(self.parameter.shape)
        if self.empty_mask is not None:
            return as_sharded(self.empty_mask, self.parameter, self.mask_shape)
        flags = self.dense_ages() > 0
        return self.layout.logical(flags, self.block, self.parameter, self.mask_shape)

    def age(self) -> Tensor:
        """Each entry's age (int64), as coarse as the masks were."""
        self.follow()
        return self.layout.logical(entry_ages.age_of(self.dense_ages()), self.block, self.parameter)

    def signed_ages(self) -> Tensor:
        """Signed ages, as coarse as the masks were; of a sharded parameter an int32 for each entry."""
        self.follow()
        ages = self.dense_ages()
        if is_sharded(self.parameter):
            return self.layout.logical(ages.int(), self.block, self.parameter, self.parameter.shape)
        return self.layout.logical(ages, self.block, self.parameter).clone()

    # --- following what happens to the parameter and its state

    def follow(self) -> None:
        """Follows the parameter to another device; begins anew where its state is gone.

        Raises:
            PolicyError: its shape has changed, so that a kernel would read and write beyond the end.
        """
        if self.parameter.shape != self.shape:
            raise PolicyError(
                f"a parameter of shape {tuple(self.shape)} now has the shape {tuple(self.parameter.shape)}; "
                "its masks and ages are no longer known: make a new optimizer for the model and wrap that"
            )
        device = self.parameter.device
        if self.ages.device != device:
            self.ages = self.ages.to(device)
            self.index = None if self.index is None else self.index.to(device)
            self._flat.clear()
            self.copies = None
            self.ready_copies()
        # Where other processes update their parts, a process without entries has no state.
        counted = self.oldest > 0 or (self.updates > 0 and not is_sharded(self.parameter))
        exact = self.rule is not None and self.layout.size > 0
        gone = not self.state and not self.dropped
        if counted and exact and gone and not self._begins_without_state():
            self.restart()

    def _begins_without_state(self) -> bool:
        """Whether the optimizer keeps nothing by which to see that its state was removed."""
        rule, group = self.rule, self.group
        return rule is not None and not rule.state(group) and not rule.tensor_state(group, 0)

    def restart(self) -> None:
        """Sets every age to 0, as after the state was removed."""
        self.ages = torch.where(self.ages > 0, 1, -1).to(self.ages.dtype)
        self.updates = self.oldest = self.uncounted = 0

    def adopt_state(self, updates: int | None = None) -> Tensor | None:
        """Takes the optimizer's state as it now stands, dense and of one age, with every entry active.

        Args:
            updates: how many updates the tensor has had; None: what the state tells.

        Returns:
            The mask that was in force, to be set again.
        """
        mask = None if self.mask_shape is None else self.mask()
        self.begin(self._updates_of_state() if updates is None else updates)
        return mask

    def _updates_of_state(self) -> int:
        if self.rule is not None:
            return self.rule.updates(self.state, self.group)
        return step_count(self.state)

    # --- the optimizer's state

    def entry_state(self) -> dict[str, Tensor]:
        """What the update rule keeps for each entry, as far as it exists.

        Raises:
            PolicyError: something has another number of entries or lies on another device; see `check_state`.
        """
        assert self.rule is not None
        state = self.state
        present = {name: state[name] for name in self.rule.names if state.get(name) is not None}
        self.check_state(present)
        return present

    def check_state(self, state: dict[str, Tensor]) -> None:
        """Makes sure that state belongs to the entries that have some.

        Raises:
            PolicyError: it has another number of entries or lies on another device; it was replaced by hand.
        """
        count = self.layout.size if self.index is None else self.ages.numel() * self.block
        device = self.parameter.device
        for name, value in state.items():
            fits = value.numel() == count or self._numbers_in(value) == count
            if not fits or value.device != device:
                raise PolicyError(
                    f"the optimizer's state {name!r} of a parameter of shape {tuple(self.shape)} on "
                    f"{device} has the shape {tuple(value.shape)} and lies on {value.device}; "
                    "load a state_dict of this model, or move the state along with it"
                )

    def _numbers_in(self, value: Tensor) -> int:
        """How many real numbers of a tensor this process holds."""
        return local_shard(value).numel() * (2 if value.is_complex() else 1)

    def complete_state(self, group: Group) -> dict[str, Tensor]:
        """The state of each entry, made where it is missing, and the tensor's count beside it."""
        assert self.rule is not None
        self.dropped = False
        starts = self.rule.state(group)
        state = self.optimizer.state[self.parameter]
        if any(state.get(name) is None for name in starts):
            state.update(self.initial_state(group, {name for name in state if state[name] is not None}))
        return {name: state[name] for name in starts}

    def initial_state(self, group: Group, present: set[str], *, dense: bool = False) -> dict[str, Any]:
        """The state of a parameter that has had `updates`, except for what is present.

        Args:
            group: the parameter's param group.
            present: names to leave out.
            dense: for all entries, whatever the index.
        """
        assert self.rule is not None
        state: dict[str, Any] = {}
        for name, value in self.rule.tensor_state(group, self.updates).items():
            if name not in present:
                state[name] = self._number(group, value)
        for name, start in self.rule.state(group).items():
            if name not in present:
                state[name] = self._filled(start, dense)
        return state

    def _number(self, group: Group, value: float) -> Tensor:
        """A tensor of one number, as torch's optimizers count."""
        fused = bool(group.get("fused"))
        on_device = bool(group.get("capturable")) or fused
        double = torch.get_default_dtype() == torch.float64 and not fused
        dtype = torch.float64 if double else torch.float32
        return torch.tensor(value, dtype=dtype, device=self.parameter.device if on_device else "cpu")

    def dense_state(self) -> dict[str, Any]:
        """The state as the wrapped optimizer itself would hold it."""
        if self.index is None or self.rule is None:
            return dict(self.state)
        starts, dense = self.rule.state(self.group), dict(self.state)
        for name, value in self.entry_state().items():
            flat = self._of_all_blocks(value, self.block, starts.get(name, 0.0))
            dense[name] = self.layout.shaped(flat, self.parameter)
        return dense

    def _filled(self, start: float, dense: bool) -> Tensor:
        own = local_shard(self.parameter)
        if self.index is not None and not dense:
            dtype = own.dtype.to_real() if own.is_complex() else own.dtype
            return torch.full((self.active_entries,), start, dtype=dtype, device=own.device)
        value = torch.zeros_like(self.parameter, memory_format=torch.preserve_format)
        if start:
            value.fill_(complex(start, start) if value.is_complex() else start)
        return value

    def set_count(self, updates: int) -> None:
        """Continues the tensor's own count from here."""
        self.updates = updates
        if self.rule is None:
            counts = {"step": float(updates)}
        else:
            counts = self.rule.tensor_state(self.group, updates)
        for name, value in counts.items():
            if isinstance(self.state.get(name), Tensor):
                self.state[name].fill_(value)

    def forget_state(self) -> bool:
        """Removes all state; returns False where the optimizer's step would not make it again."""
        if not makes_state_again(self.optimizer):
            return False
        self.optimizer.state.pop(self.parameter, None)
        return True

    def ready_plain_step(self) -> None:
        """Makes the state what the wrapped optimizer's own update would have left."""
        if self.rule is None or self.mode is not Mode.PLAIN:
            return
        if self.bias_correction == "entry" and self.layout.size:
            age = int(entry_ages.age_of(self.ages)) + self.uncounted
            if age == 0 and self.forget_state():
                self.updates = 0
                return
            self.set_count(age)
        if self.updates or self.state:
            self.complete_state(self.group)

    def forget_views(self) -> None:
        """Lets go of flat views of the state, which moves."""
        self._flat.clear()

    # --- updates

    def entry_update(
        self, group: Group, names: tuple[str, ...], gradient: Tensor, age: int | None
    ) -> EntryUpdate:
        """The update of the active entries by the rule; `write_back` takes what it could not write in place.

        Args:
            group: the parameter's param group.
            names: what the rule keeps for each entry.
            gradient: the parameter's gradient.
            age: the age to take for all entries; None: each one's own.
        """
        self.follow()
        stored = self.state
        state = {name: stored[name] for name in names if stored.get(name) is not None}
        if len(state) < len(names):
            state = self.complete_state(group)
        self.check_state(state)
        lies_plainly = self.layout.lies_plainly
        if self.index is None:
            for name, value in state.items():
                if not lies_plainly(value):
                    state[name] = self._in_memory_order(name, value)
        parameter = self.parameter
        return EntryUpdate(
            parameter if lies_plainly(parameter) else self._in_memory_order("", parameter),
            gradient if lies_plainly(gradient) else self.layout.flat(gradient),
            state,
            self.ages,
            self.block,
            self.index,
            self.uncounted,
            age,
        )

    def _in_memory_order(self, name: str, tensor: Tensor) -> Tensor:
        """The tensor as a flat vector: a view that is kept while the tensor stays, else a copy."""
        source, flat = self._flat.get(name, (None, tensor))
        if source is tensor and flat.data_ptr() == tensor.data_ptr():
            return flat
        flat = self.layout.flat(tensor)
        if not is_sharded(tensor) and flat.data_ptr() == tensor.data_ptr():
            self._flat[name] = (tensor, flat)
        else:
            self._unwritten.append((flat, tensor))
        return flat

    def write_back(self) -> None:
        """Takes the results of an update that were written to copies."""
        for flat, tensor in self._unwritten:
            self.layout.write_back(flat, tensor)
        self._unwritten.clear()

    def count_update(self) -> None:
        """Notes that an update took place."""
        self.updates += 1
        self.uncounted += 1
        self.oldest += 1

    def count_update_elsewhere(self) -> None:
        """Notes that other processes have updated their parts of the tensor."""
        self.set_count(self.updates + 1)

    # --- where the wrapped optimizer steps and frozen entries are put back

    def ready_copies(self) -> None:
        """Makes buffers for frozen entries where a step needs them, and only there."""
        waits = self.mode in (Mode.FROZEN, Mode.ELSEWHERE) and not needs_closure(self.optimizer)
        if self.rule is not None or self.is_full or waits:
            self.copies = None
        else:
            self.copies = self.copies or FrozenCopies(self.layout)
            self.copies.take_mask(self.ages, self.block)

    def mask_gradient(self, gradient: Tensor) -> None:
        """Zeroes the gradient of frozen entries in place, NaN and infinity too."""
        self.follow()
        gradient = own_gradient(self.parameter, gradient)
        flat = self.layout.flat(gradient)
        ages = self.ages if self.index is None else None
        select(flat.device, flat.dtype).fill_frozen(flat, ages, self.index, self.block, 0.0)
        self.layout.write_back(flat, gradient)


def step_count(state: dict[str, Any]) -> int:
    """The step count that an optimizer's state of a parameter tells, 0 where it tells none."""
    step = state.get("step", 0)
    return int(step.item()) if isinstance(step, Tensor) else int(step)
