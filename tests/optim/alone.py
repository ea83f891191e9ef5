"""The references: torch's own optimizer on each entry alone over its active steps, or put back by hand."""

import copy
import importlib

import torch

from gradpolicy.optim.update_rules import RULES, rule_for

WITH_RULE = {
    name: getattr(importlib.import_module(package), name)
    for package, _, name in (path.rpartition(".") for path in RULES)
    if package != "schedulefree"  # which count for a param group, and train in a mode of their own
}
"""The optimizers that the table of update rules has, by name."""


def run_alone(kind, settings, start, gradients, masks, frozen_state, rates=None):
    """Where each entry ends.

    Args:
        kind: optimizer class.
        settings: its keyword arguments.
        start: initial values.
        gradients: a gradient a step; None where there is none.
        masks: a mask a step.
        frozen_state: "keep", "zero" or "drop".
        rates: a learning rate a step; None: that of the settings.
    """
    end = start.clone().view(-1)
    for entry in range(start.numel()):
        alone = torch.nn.Parameter(end[entry].clone())
        optimizer = kind([alone], **settings)
        was_active = True
        for step, (gradient, mask) in enumerate(zip(gradients, masks, strict=True)):
            active = bool(mask.expand(start.shape).reshape(-1)[entry])
            if was_active and not active and frozen_state != "keep":
                optimizer = kind([alone], **settings)
            was_active = active
            if rates is not None:
                optimizer.param_groups[0]["lr"] = rates[step]
            if active and gradient is not None:
                alone.grad = gradient.reshape(-1)[entry].clone()
                optimizer.step()
        end[entry] = alone.detach()
    return end.view(start.shape)


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

    For optimizers that count for whole tensors, and whose state of an entry begins at 0.
    """

    def _parts(self, start):
        return [torch.nn.Parameter(start.clone())]

    def value(self, place):
        return self.entries[place][0].detach().reshape(-1)

    def _of_entries(self, parameter):
        state = self.optimizer.state.get(parameter, {})
        return {key: value for key, value in state.items() if getattr(value, "shape", ()) == parameter.shape}

    def forget(self, place, flags):
        (parameter,) = self.entries[place]
        if flags.all():
            self.optimizer.state.pop(parameter, None)
        for value in self._of_entries(parameter).values():
            value.masked_fill_(flags, 0)

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
                after.copy_(torch.where(mask, after, state.get(key, torch.zeros_like(after))))


def without_rule(kinds):
    """Those of some functions that make optimizers whose optimizer has no update rule (yet)."""
    found = {
        name: make
        for name, make in kinds.items()
        if rule_for(make([torch.nn.Parameter(torch.zeros(2, 2))])) is None
    }
    assert found, f"each of {', '.join(kinds)} has an update rule: add one that has none"
    return found
