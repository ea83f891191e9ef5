"""The references: torch's own optimizer on each entry alone over its active steps, or put back by hand."""

import copy
import importlib

import torch

from gradpolicy import MaskedOptimizer
from gradpolicy.optim.update_rules import RULES, rule_for
from tests.fixtures import through_a_file

WITH_RULE = {
    name: getattr(importlib.import_module(package), name)
    for package, _, name in (path.rpartition(".") for path in RULES)
    if package != "schedulefree"  # which count for a param group, and train in a mode of their own
}
"""The optimizers that the table of update rules has, by name."""


def run_alone(kind, settings, start, gradients, masks, frozen_state):
    """Where each entry ends, with a gradient and a mask a step."""
    reference = EachAlone(lambda parts: kind(parts, **settings), start)
    for gradient, mask in zip(gradients, masks, strict=True):
        if frozen_state != "keep":
            reference.forget(~mask.expand(start.shape))
        reference.step(gradient, mask.expand(start.shape), settings["lr"])
    return reference.value


class Alone:
    """Torch's own optimizer with a parameter for each entry, so that all that it counts is the entry's own.

    Args:
        make: makes the optimizer of some parameters.
        starts: what to begin with.
    """

    def __init__(self, make, starts):
        self.entries = [self._parts(start) for start in starts]
        self.optimizer = make(self.entries[0])
        for entries in self.entries[1:]:
            self.optimizer.add_param_group({"params": entries})

    def _parts(self, start):
        return [torch.nn.Parameter(value.clone()) for value in start.reshape(-1)]

    def add(self, start):
        self.entries.append(self._parts(start))
        self.optimizer.add_param_group({"params": self.entries[-1]})

    def value(self, place):
        return torch.stack([entry.detach() for entry in self.entries[place]])

    def forget(self, place, flags):
        """Have entries begin anew where flags are set."""
        for entry, flag in zip(self.entries[place], flags.reshape(-1), strict=True):
            if flag:
                self.optimizer.state.pop(entry, None)

    def step(self, gradients, masks):
        for entries, gradient, mask in zip(self.entries, gradients, masks, strict=True):
            for index, entry in enumerate(entries):
                active = gradient is not None and mask.reshape(-1)[index]
                entry.grad = gradient.reshape(-1)[index].clone() if active else None
        self.optimizer.step()

    def saved(self):
        states = [[self.optimizer.state.get(entry) for entry in entries] for entries in self.entries]
        return copy.deepcopy(states)

    def load(self, saved):
        self.optimizer.state.clear()
        for entries, states in zip(self.entries, copy.deepcopy(saved), strict=True):
            pairs = zip(entries, states, strict=True)
            self.optimizer.state.update({entry: state for entry, state in pairs if state})


class PutBack(Alone):
    """Torch's own optimizer, after each of whose steps frozen entries and their state are put back by hand.

    For optimizers that count for full tensors.

    Args:
        make: makes the optimizer of some parameters.
        starts: what to begin with.
        begins: the state of an entry at its beginning.
        restarts: True if a tensor of which every entry begins anew counts anew.
    """

    def __init__(self, make, starts, begins=0.0, restarts=True):
        super().__init__(make, starts)
        self.begins, self.restarts = begins, restarts

    def _parts(self, start):
        return [torch.nn.Parameter(start.clone())]

    def value(self, place):
        return self.entries[place][0].detach().reshape(-1)

    def _of_entries(self, parameter):
        state = self.optimizer.state.get(parameter, {})
        return {key: value for key, value in state.items() if getattr(value, "shape", ()) == parameter.shape}

    def forget(self, place, flags):
        (parameter,) = self.entries[place]
        if flags.all() and self.restarts:
            self.optimizer.state.pop(parameter, None)
        for value in self._of_entries(parameter).values():
            value.masked_fill_(flags, self.begins)

    def step(self, gradients, masks):
        before = []
        for (parameter,), gradient, mask in zip(self.entries, gradients, masks, strict=True):
            active = gradient is not None and mask.any()
            parameter.grad = gradient.masked_fill(~mask, 0) if active else None
            state = {key: value.clone() for key, value in self._of_entries(parameter).items()}
            before.append((parameter, mask, parameter.detach().clone(), state))
        self.optimizer.step()
        for parameter, mask, value, state in before:
            parameter.data = torch.where(mask, parameter.detach(), value)
            for key, after in self._of_entries(parameter).items():
                after.copy_(torch.where(mask, after, state.get(key, torch.full_like(after, self.begins))))


def without_rule(kinds):
    """Those of some functions that make optimizers whose optimizer has no update rule (yet)."""
    weights = [torch.nn.Parameter(torch.zeros(2, 2))]
    found = {name: make for name, make in kinds.items() if rule_for(make(weights)) is None}
    assert found, f"each of {', '.join(kinds)} has an update rule: add one that has none"
    return found


FROZEN_STATES = ["keep", "zero", "drop"]


class EachAlone:
    """An optimizer for each entry of a tensor, which begins anew when the entry loses its state.

    Args:
        make: makes the optimizer of an entry.
        start: what to begin with.
    """

    def __init__(self, make, start):
        self.make, self.start, self.shape = make, start, start.shape
        self.parts = [torch.nn.Parameter(part.clone()) for part in start.flatten()]
        self.optimizers = [make([part]) for part in self.parts]

    @property
    def value(self):
        parts = [part.detach().reshape(-1) for part in self.parts]
        return torch.cat(parts).view(self.shape) if parts else self.start.clone()

    def places(self, flags):
        return flags.flatten().nonzero().flatten()

    def forget(self, frozen):
        for place in self.places(frozen):
            self.optimizers[place] = self.make([self.parts[place]])

    def switch(self, mask, name):
        for place in self.places(mask):
            getattr(self.optimizers[place], name)()

    def step(self, gradient, mask, lr):
        for place in self.places(mask):
            set_rate(self.optimizers[place], lr)
            self.parts[place].grad = gradient.flatten()[place].clone()
            self.optimizers[place].step()


def set_rate(optimizer, lr):
    for group in optimizer.param_groups:
        group["lr"] = torch.as_tensor(lr) if isinstance(group["lr"], torch.Tensor) else lr


def saved_and_loaded(optimizer, make, weight, dense):
    """Another optimizer with the state, through a file."""
    loaded = MaskedOptimizer(make([weight]), frozen_state="zero")
    loaded.load_state_dict(through_a_file(optimizer.state_dict(dense=dense)))
    return loaded


def follow_course(make, reference, weight, draw_mask, generator, steps, tolerance, evaluates=False):
    """Takes steps under random masks, rates and reloads, and compares with a reference after each.

    Args:
        make: makes the optimizer of some parameters.
        reference: has `value`, `forget(frozen)` and `step(gradient, mask, lr)`.
        weight: the parameter.
        draw_mask: draws a mask from a generator; None: all train.
        generator: what decides.
        steps: how many.
        tolerance: of values.
        evaluates: True if the optimizer has `train` and `eval`.
    """
    mask = torch.ones(weight.shape, dtype=torch.bool)
    optimizer = MaskedOptimizer(make([weight]))
    for _ in range(steps):
        event = float(torch.rand((), generator=generator, device="cpu"))
        if event < 0.4:
            drawn = draw_mask(generator)
            state = FROZEN_STATES[int(torch.randint(3, (), generator=generator, device="cpu"))]
            optimizer.set_mask(weight, drawn, frozen_state=state)
            mask = torch.ones_like(mask) if drawn is None else drawn.expand(weight.shape)
            if state != "keep":
                reference.forget(~mask)
        before = weight.detach().clone()
        if evaluates and event > 0.7:
            optimizer.eval()
            reference.switch(mask, "eval")
            torch.testing.assert_close(weight.detach(), reference.value, atol=tolerance, rtol=tolerance)
        if 0.4 < event < 0.55 or event > 0.85:
            optimizer = saved_and_loaded(optimizer, make, weight, 0.4 < event < 0.5)
        if evaluates:
            optimizer.train()
            reference.switch(mask, "train")
        set_rate(optimizer, lr := 0.1 if event < 0.8 else 0.02)
        gradient = torch.randn(weight.shape, generator=generator, device="cpu").to(weight)
        weight.grad = gradient.masked_fill(~mask, torch.nan)
        optimizer.step()
        assert torch.equal(weight.detach()[~mask], before[~mask])
        if mask.any():
            reference.step(gradient, mask, lr)
        torch.testing.assert_close(weight.detach(), reference.value, atol=tolerance, rtol=tolerance)
