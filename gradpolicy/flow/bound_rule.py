"""A rule as it stands in a model: whether it holds now, its scheduled numbers, and what it has met."""

import itertools
import sys
import warnings
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from gradpolicy.flow.autograd_functions import BackwardRule
from gradpolicy.flow.norms import NormMeter
from gradpolicy.rules.registry import Rule, keyword_names
from gradpolicy.when import When

# Under torch.compile counts are taken while tracing, through the key of the binding: see count_traced. It is
# a string, since the compiler takes a whole number that changes for a symbol.
_BINDINGS: "weakref.WeakValueDictionary[str, Binding]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()

# The keys of the rules that compiled code has met. When it runs again nobody sees what it meets.
_MET_IN_COMPILED_CODE: set[str] = set()


class Binding:
    """One policy's rule in a model.

    Args:
        name: The policy's name.
        rule: The rule; a callable among its parameters is a schedule.
        detaches: Whether the gradient is cut off rather than asked of the rule.
        when: When it holds.
        is_reported: Whether what it has met in compiled code is counted. For blocks it is not; then the
            compiler has nothing to tell one from the next by, and need not compile anew for each.
        written: The policy as a person writes it.
    """

    def __init__(
        self,
        name: str,
        rule: Rule,
        *,
        detaches: bool = False,
        when: When | None = None,
        is_reported: bool = True,
        written: str = "",
    ) -> None:
        self.name = name
        self.written = written
        self.is_reported = is_reported
        self.when = when
        self.detaches = detaches
        self.active = True
        # Whether a forward pass with gradients has run while the rule held, and while it did not.
        self.has_held = self.has_rested = False
        self.schedules = {key: value for key, value in rule.parameters.items() if callable(value)}
        self.rule = with_numbers(rule)
        self.meter = NormMeter()
        self.matched: Counter[str] = Counter()
        # Those of nn.ReLU by themselves: a look-up in the table would count in what runs at every layer.
        self.relus = 0
        self.without_gradient: set[str] = set()
        self.compiled = False
        self.unseen: dict[str, str] = {}
        self._take_key()

    def at(self, place: str, *, sums_broadcast: bool = False) -> BackwardRule:
        """The rule at a place."""
        policy = self.name if self.is_reported else None
        return BackwardRule(self.rule, place, sums_broadcast, self.meter, tuple(self.schedules), policy)

    def count(self, place: str) -> None:
        """Counts one more place where the rule was put."""
        if torch.compiler.is_compiling():
            count_traced(self.key, place)
        else:
            self.matched[place] += 1

    def counts(self) -> dict[str, int]:
        """How often the rule was put so far, by operation or place."""
        return dict(self.matched + Counter(relu=self.relus))

    def meet(self, operation: str) -> None:
        """Notes an operation that ran where no gradient is asked for, so that there was nothing to do."""
        if not torch.compiler.is_compiling():
            self.without_gradient.add(operation)

    def may_have_met(self) -> bool:
        """Whether code that was compiled earlier may have met it, unseen."""
        frames: Any = sys.modules.get("torch._dynamo.convert_frame")
        if frames is None or self.key not in _MET_IN_COMPILED_CODE:
            return False
        # None of it is left after torch._dynamo.reset().
        return bool(getattr(getattr(frames, "input_codes", None), "seen_ids", True))

    def note_forward(self) -> None:
        """Notes that a forward pass with gradients runs."""
        if self.active:
            self.has_held = True
        else:
            self.has_rested = True

    def note_unseen(self, call: str, reason: str) -> None:
        """Keeps in mind, and says once, that a call could not be seen into."""
        if torch.compiler.is_compiling():
            note_unseen_traced(self.key, self.name, call, reason)
        elif call not in self.unseen:
            self.unseen[call] = reason
            _warn_of_unseen(self.name, call, reason)

    def update(self, phase: str, step: int, epoch: int) -> None:
        """Switches the rule on or off for a time, and sets its scheduled numbers."""
        if self.when is None:
            return
        self.active = self.when.active(phase=phase, step=step, epoch=epoch)
        count = epoch if self.when.unit == "epoch" else step
        for key, schedule in self.schedules.items():
            self.rule.parameters[key].fill_(float(schedule(count)))

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Tells a rule with absolute thresholds what the loss is multiplied by."""
        if "loss_scale" not in (keyword_names(self.rule.function) or ()):
            return
        known = self.rule.parameters.get("loss_scale")
        if isinstance(known, Tensor):
            known.copy_(torch.as_tensor(scale)) if isinstance(scale, Tensor) else known.fill_(scale)
        elif isinstance(scale, Tensor) or scale != 1.0:
            self.rule.parameters["loss_scale"] = _number(float(scale))  # type: ignore[index]

    def _take_key(self) -> None:
        # Alike for blocks alike, so that the compiler need not compile anew for each.
        self.key = f"{self.name}: {self.rule.name}"
        if self.is_reported:
            self.key = f"binding {next(_NUMBERS)}"
            _BINDINGS[self.key] = self

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._take_key()


def with_numbers(rule: Rule) -> Rule:
    """A rule with a number in the place of each schedule, that of count 0.

    It lives in a tensor, so that compiled code reads it anew at each step.
    """
    schedules = {key: value for key, value in rule.parameters.items() if callable(value)}
    if not schedules:
        return replace(rule, parameters=dict(rule.parameters))
    return rule.with_parameters(**{key: _number(schedule(0)) for key, schedule in schedules.items()})


def count_traced(key: str, place: str) -> None:
    """Counts while ``torch.compile`` traces; the compiled code holds nothing of it."""
    _MET_IN_COMPILED_CODE.add(key)
    binding = _BINDINGS.get(key)
    if binding is not None:
        binding.matched[place] += 1
        binding.compiled = True


def note_forward_traced(keys: tuple[str, ...]) -> None:
    """Notes while ``torch.compile`` traces that a forward pass runs."""
    for key in keys:
        binding = _BINDINGS.get(key)
        if binding is not None:
            binding.note_forward()


def note_unseen_traced(key: str, name: str, call: str, reason: str) -> None:
    """Notes, and says, while ``torch.compile`` traces that a call could not be seen into."""
    binding = _BINDINGS.get(key)
    if binding is None or call not in binding.unseen:
        _warn_of_unseen(name, call, reason)
    if binding is not None:
        binding.unseen[call] = reason


def _warn_of_unseen(name: str, call: str, reason: str) -> None:
    warnings.warn(f"policy {name!r} cannot see into {call}: {reason}", stacklevel=5)


# What torch.compiler.assume_constant_result does, without its import of the whole compiler: the functions run
# while tracing, and only then.
for _function in (count_traced, note_forward_traced, note_unseen_traced):
    _function.__dict__["_dynamo_marked_constant"] = True


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)
