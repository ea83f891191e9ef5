"""A rule in a model: whether it is active, its scheduled numbers, what it has met, and what it returns.

:class:`RuleState` is one per policy, :class:`BoundRule` one per location. Autograd nodes call the latter.
"""

import itertools
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, warn_user
from gradpolicy.rules.call import Call
from gradpolicy.rules.registry import Rule, keyword_names
from gradpolicy.rules.routing import broadcasts, first_index
from gradpolicy.when import When

# While torch.compile traces, a state is found by its key. The key is a string, since the compiler would turn
# a number that changes into a symbol.
_STATES: "weakref.WeakValueDictionary[str, RuleState]" = weakref.WeakValueDictionary()
_NUMBERS = itertools.count()

# The keys of the rules that compiled code has met. Nobody sees what that code meets when it runs again.
_MET_IN_COMPILED_CODE: set[str] = set()
# Those of which it has met an operation with a discrete result.
_DISCRETE_IN_COMPILED_CODE: set[str] = set()


AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class GradientNorms:
    """Adds up squared norms while it is on. The tensors stay on their device until somebody reads them.

    Attributes:
        on: Whether it measures.
        counts_zeros: Whether it counts zeros too.
        zeros: How many entries of the gradients let through were 0; None if none were counted.
        entries: How many entries these had.
    """

    def __init__(self) -> None:
        self.on = self.counts_zeros = False
        self.clear()

    def clear(self) -> None:
        """Forgets what was measured."""
        self._before: Tensor | None = None
        self._after: Tensor | None = None
        self.zeros: Tensor | None = None
        self.entries = 0

    def measure(self, before: Any, after: Iterable[Tensor | None]) -> None:
        """Adds a gradient, or a tuple of them, before and after the rule; nothing in compiled code."""
        if not self.on or torch.compiler.is_compiling():
            return
        with torch.no_grad():
            passed = [tensor for tensor in after if tensor is not None]
            self._before = _add_squares(self._before, before if isinstance(before, tuple) else (before,))
            self._after = _add_squares(self._after, passed)
            for tensor in passed if self.counts_zeros else ():
                zeros = tensor.numel() - tensor.count_nonzero()
                self.zeros = zeros if self.zeros is None else self.zeros + zeros
                self.entries += tensor.numel()

    def read(self) -> tuple[Tensor, Tensor] | None:
        """The norms over everything measured since the last clearing; None if that is nothing."""
        if self._before is None or self._after is None:
            return None
        return self._before.sqrt(), self._after.sqrt()


class FlowObserver(Protocol):
    """Is told what a policy did; see :meth:`gradpolicy.flow.install.Installed.observe`."""

    def cut(self, policy: str, location: str, tensors: Iterable[Tensor], results: Any) -> None:
        """The policy cut results off from the graph of these tensors."""

    def passed(self, policy: str, gradients: Iterable[Tensor | None]) -> None:
        """The policy let these gradients through."""


class RuleState:
    """The rule of one policy, or of one operation of a ``gradient_override``, and what happens to it.

    Args:
        name: The policy's name.
        rule: The rule. A callable among its parameters is a schedule.
        detaches: Whether the graph is cut instead of asking the rule.
        when: When it is active.
        calls: The numbers of the calls that it is for, of each operation within a module's forward; none
            means all.
        argument: The one argument of each operation that it is for, by name or position; None means all.
        has_own_gradient: Whether what it acts on has a gradient of its own, which a rule's filter or its
            ``own`` can change; otherwise the rule's function makes it.
        is_reported: Whether it counts what it meets in compiled code. For a ``gradient_override`` it does
            not, so that the compiler cannot tell one from the next and need not compile anew for each.
        written: The policy as a person writes it.
    """

    # How often any rule has been used so far, but in compiled code.
    uses = 0

    def __init__(
        self,
        name: str,
        rule: Rule,
        *,
        detaches: bool = False,
        when: When | None = None,
        calls: Sequence[int] = (),
        argument: int | str | None = None,
        has_own_gradient: bool = True,
        is_reported: bool = True,
        written: str = "",
    ) -> None:
        self.name = name
        self.written = written
        self.is_reported = is_reported
        self.when = when or When()
        self.calls = tuple(calls)
        self.argument = argument
        self.detaches = detaches
        # Whether the rule's filter changes the gradient that comes in.
        self.filters = has_own_gradient and rule.gradient_filter is not None
        self.active = True
        # Whether a forward pass with gradients ran while the rule was active, and while it was not.
        self.ran_active = self.ran_inactive = False
        # Whether compiled code ran with it, which does not say which modules it entered.
        self.traced = False
        self.schedules = {key: value for key, value in rule.parameters.items() if callable(value)}
        # A scheduled number lives in a tensor, so that compiled code reads it anew at each step.
        numbers = {key: _number(schedule(0)) for key, schedule in self.schedules.items()}
        self.rule = replace(rule, parameters={**rule.parameters, **numbers})
        # The numbers that may be others when the backward pass runs: scheduled and learnt ones.
        self.changing = tuple(
            key
            for key, value in self.rule.parameters.items()
            if isinstance(value, Tensor) and (value.requires_grad or value.dim() == 0)
        )
        self.norms = GradientNorms()
        self.observer: FlowObserver | None = None
        self.matched: Counter[str] = Counter()
        # Operations and places to which no gradient came, and places passed while the rule was off.
        self.without_gradient: set[str] = set()
        self.off: set[str] = set()
        # Operations with discrete results, and the functions in which the gradient of these was lost.
        self.discrete: set[str] = set()
        self.lost_in: set[tuple[str, str]] = set()
        self.compiled = False
        self.opaque: dict[str, str] = {}
        self._take_key()

    def count(self, location: str) -> None:
        """Counts one more use of the rule, by operation or location."""
        if torch.compiler.is_compiling():
            _count_while_tracing(self.key, location)
        else:
            self.matched[location] += 1
            RuleState.uses += 1

    def note_cut(self, location: str, tensors: Iterable[Tensor], results: Any = ()) -> None:
        """Notes that results were cut off from the graph of some tensors."""
        if not torch.compiler.is_compiling() and self.observer is not None:
            self.observer.cut(self.name, location, tensors, results)

    def is_due(self, place: str, number: int) -> bool:
        """Whether the rule is to act at a place of a module now, in the call with this number.

        It notes the place if it is not, unless another call is meant.
        """
        if not self.active:
            self.note_off(place)
        elif not torch.is_grad_enabled():
            self._note("without_gradient", place)
        else:
            return not self.calls or number in self.calls
        return False

    def note_without_gradient(self, operation: str) -> None:
        """Notes an operation or place to which no gradient comes, so that there was nothing to do."""
        self._note("without_gradient", operation)

    def note_off(self, place: str) -> None:
        """Notes a place that was passed while the rule was off, so that it need not be met."""
        self._note("off", place)

    def _note(self, kind: str, what: str) -> None:
        """Adds to one of the sets of what was seen."""
        if torch.compiler.is_compiling():
            _note_while_tracing(self.key, kind, what)
        else:
            getattr(self, kind).add(what)

    def note_discrete(self, operation: str) -> None:
        """Notes an operation whose result is discrete. It counts once that has become floating-point."""
        if torch.compiler.is_compiling():
            _note_discrete_while_tracing(self.key, operation)
        else:
            self.discrete.add(operation)

    def may_have_met_discrete(self) -> bool:
        """Whether compiled code has met an operation with a discrete result."""
        return self.key in _DISCRETE_IN_COMPILED_CODE

    def note_lost(self, operation: str, function: str, is_index: bool) -> None:
        """Says once that the result of an operation went into a function that cannot carry a gradient."""
        policy = f"policy {self.name!r}: " if self.is_reported else ""
        if torch.compiler.is_compiling():
            _warn_of_lost_path(policy, operation, function, is_index)
        elif (operation, function) not in self.lost_in:
            self.lost_in.add((operation, function))
            _warn_of_lost_path(policy, operation, function, is_index)

    def note_forward(self) -> None:
        """Notes that a forward pass with gradients runs."""
        if torch.compiler.is_compiling():
            _note_forward_while_tracing(self.key)
        else:
            self._note_forward()

    def note_opaque(self, call: str, reason: str) -> None:
        """Notes, and says once, that the rule cannot act on operations inside a call."""
        if torch.compiler.is_compiling():
            _note_opaque_while_tracing(self.key, self.name, call, reason)
        else:
            self._note_opaque(call, reason)

    def may_have_met(self) -> bool:
        """Whether code that was compiled earlier may have met the rule's operation without our seeing it."""
        frames: Any = sys.modules.get("torch._dynamo.convert_frame")
        if frames is None or self.key not in _MET_IN_COMPILED_CODE:
            return False
        # torch._dynamo.reset() leaves none of that code.
        return bool(getattr(getattr(frames, "input_codes", None), "seen_ids", True))

    def update(self, phase: str, step: int, epoch: int) -> None:
        """Switches the rule on or off for a time, and sets its scheduled numbers."""
        self.active = self.when.active(phase=phase, step=step, epoch=epoch)
        count = self.when.count(step, epoch)
        for key, schedule in self.schedules.items():
            self.rule.parameters[key].fill_(float(schedule(count)))

    def set_loss_scale(self, scale: float | Tensor) -> None:
        """Tells a rule with absolute thresholds the factor on the loss."""
        if "loss_scale" not in (keyword_names(self.rule.function) or ()):
            return
        current = self.rule.parameters.get("loss_scale")
        if isinstance(current, Tensor):
            current.copy_(torch.as_tensor(scale))
        elif isinstance(scale, Tensor) or scale != 1.0:
            self.rule.parameters["loss_scale"] = _number(float(scale))  # type: ignore[index]

    def _note_forward(self) -> None:
        if self.active:
            self.ran_active = True
        else:
            self.ran_inactive = True

    def _note_opaque(self, call: str, reason: str) -> None:
        if call not in self.opaque:
            self.opaque[call] = reason
            _warn_of_opaque(self.name, call, reason)

    def _take_key(self) -> None:
        self.key = f"{self.name}: {self.rule.name}"
        if self.is_reported:
            self.key = f"policy {next(_NUMBERS)}"
            _STATES[self.key] = self

    def __getstate__(self) -> dict:
        # A copied model is nobody's to observe.
        return {**self.__dict__, "observer": None}

    def __setstate__(self, state: dict) -> None:
        self.__dict__.update(state)
        self._take_key()


class BoundRule:
    """A rule at one location. It checks what the rule returns.

    Args:
        state: The rule, and whether it is active.
        location: Where it acts, for messages: ``"operation 'relu'"``.
        sums_broadcast: Whether a gradient in the output's shape is summed for an input that was broadcast.
        parameters: The rule's numbers; if None, those of the state.
    """

    def __init__(
        self,
        state: RuleState,
        location: str,
        *,
        sums_broadcast: bool = False,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        self.state = state
        self.rule = state.rule
        self.location = location
        self.sums_broadcast = sums_broadcast
        self.parameters = state.rule.parameters if parameters is None else parameters
        self.takes_call = self.rule.takes_call and not state.filters
        if self.takes_call and "call" not in self.parameters:
            self.parameters = {**self.parameters, "call": Call(location)}

    @property
    def reads(self) -> tuple[str, ...]:
        """Which of ``"inputs"`` and ``"output"`` the rule reads the values of."""
        return () if self.state.filters else self.rule.reads or ()

    def with_current_numbers(self) -> "BoundRule":
        """The rule with its changing numbers as they are now, whatever they are when backward runs."""
        if not self.state.changing:
            return self
        now = {key: self.parameters[key].clone() for key in self.state.changing}
        return BoundRule(
            self.state,
            self.location,
            sums_broadcast=self.sums_broadcast,
            parameters={**self.parameters, **now},
        )

    def for_call(self, call: Call) -> "BoundRule":
        """The rule, which asks for it, with the call that its gradient is of."""
        return BoundRule(
            self.state,
            self.location,
            sums_broadcast=self.sums_broadcast,
            parameters={**self.parameters, "call": call},
        )

    def gradients(
        self,
        grad: Any,
        inputs: tuple[Tensor, ...],
        output: Any,
        wanted: Sequence[bool],
        module: str | None = None,
    ) -> list[Tensor | None]:
        """The rule's gradients, one per input, checked and in each input's dtype.

        Args:
            grad: The gradient of the output; a tuple if the output is one. For a rule that changes the
                operation's own gradients: these, one per input.
            inputs: The inputs.
            output: The output.
            wanted: Which inputs need a gradient.
            module: The module in whose forward the operation ran, for messages.

        Raises:
            PolicyError: If the rule fails, or returns the wrong number, shape or kind of gradients.
        """
        gradients: Sequence
        if self.state.filters and self.rule.gradient_filter is not None:
            gradients = [self._call(module, self.rule.gradient_filter, grad)]
            if gradients[0] is None:
                raise self._error(module, "returned None; a gradient filter returns a tensor")
        elif self.rule.own and self.rule.each:
            gradients = [
                None if one is None else self._returned(module, one, (tensor,), tensor, (True,))[0]
                for one, tensor in zip(grad, inputs, strict=True)
            ]
        else:
            gradients = self._returned(module, grad, inputs, output, wanted)
        checked = [
            self._checked(module, number, gradient, tensor, output) if needed else None
            for number, (gradient, tensor, needed) in enumerate(zip(gradients, inputs, wanted, strict=True))
        ]
        self.state.norms.measure(grad, checked)
        if not torch.compiler.is_compiling() and self.state.observer is not None:
            self.state.observer.passed(self.state.name, checked)
        return checked

    def _call(self, module: str | None, function: Callable, *arguments: Any) -> Any:
        """Calls the user's function. No override may act on the operations that it computes with.

        Raises:
            PolicyError: In place of what the function raises, with the location and the shapes.
        """
        with torch._C.DisableTorchFunction():
            if torch.compiler.is_compiling():
                return function(*arguments, **self.parameters)
            try:
                return function(*arguments, **self.parameters)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                raise self._failure(module, error, *arguments) from error

    def _returned(
        self,
        module: str | None,
        grad: Any,
        inputs: tuple[Tensor, ...],
        output: Any,
        wanted: Sequence[bool],
    ) -> Sequence:
        """What the rule's function returns, one gradient per input.

        Raises:
            PolicyError: If it returns the wrong number, or one gradient where several inputs need one.
        """
        returned = self._call(module, self.rule.function, grad, inputs, output)
        if isinstance(returned, tuple | list):
            if len(returned) != len(inputs):
                raise self._error(
                    module,
                    f"returned {len(returned)} gradients {_shapes(returned)} "
                    f"for {len(inputs)} inputs {_shapes(inputs)}",
                )
            return returned
        first = list(wanted).index(True) if self.rule.own else first_index(inputs)
        if any(wanted[number] for number in range(len(inputs)) if number != first):
            raise self._error(module, self._of_several_inputs(returned, inputs))
        return [returned if number == first else None for number in range(len(inputs))]

    def _of_several_inputs(self, returned: Any, inputs: tuple[Tensor, ...]) -> str:
        """Says that one gradient is too few for several inputs, and how to say which is meant."""
        text = (
            f"returned one gradient ({_kind(returned)}) for {len(inputs)} inputs {_shapes(inputs)} of which "
            "others need one too; use a function that returns a tuple with one for each, None where there is "
            "none"
        )
        if self.state.is_reported:
            text += ", or name the input that the gradient is for (argument=…)"
        if self.rule.each and self.sums_broadcast:
            text += "; or change the operation's own gradients, for every input (own=True)"
        return text

    def _checked(
        self, module: str | None, number: int, gradient: Any, tensor: Tensor, output: Any
    ) -> Tensor | None:
        if gradient is None:
            return None
        wrong = ""
        if not isinstance(gradient, Tensor):
            wrong = f"{_kind(gradient)} as gradient {number}; it must be a tensor"
        elif not (gradient.is_floating_point() or gradient.is_complex()):
            wrong = f"gradient {number} in {gradient.dtype}; it must be floating-point"
        elif gradient.is_complex() and not tensor.is_complex():
            wrong = f"a complex gradient {number} for an input in {tensor.dtype}"
        elif gradient.shape != tensor.shape:
            if self.sums_broadcast and _was_broadcast(tensor, output, gradient):
                gradient = gradient.sum_to_size(tensor.shape)
            else:
                wrong = (
                    f"gradient {number} of shape {_shapes(gradient)} for an input of shape {_shapes(tensor)}"
                )
        if wrong:
            raise self._error(module, f"returned {wrong}")
        return gradient if gradient.dtype == tensor.dtype else gradient.to(tensor.dtype)

    def _failure(
        self, module: str | None, error: Exception, grad: Any, inputs: Any = (), output: Any = None
    ) -> PolicyError:
        given = [f"a gradient of shape {_shapes(grad)}"]
        if inputs:
            given.append(f"inputs of shapes {_shapes(inputs)}")
        if output is not None:
            given.append(f"an output of shape {_shapes(output)}")
        reason = " ".join(str(error).split()).removeprefix(f"rule {self.rule.name!r}: ")
        kind = "" if isinstance(error, PolicyError) else f"{type(error).__name__}: "
        return self._error(module, f"failed with {', '.join(given)}: {kind}{reason}")

    def _error(self, module: str | None, text: str) -> PolicyError:
        policy = f"policy {self.state.name!r}: " if self.state.is_reported else ""
        where = self.location
        if module is not None:
            where += f" in module {module!r}" if module else " in the model"
        return PolicyError(f"{policy}rule {self.rule.name!r} at {where}: {text}")


def rule_uses() -> int:
    """How often any rule has been used so far: two readings tell whether one was used between them."""
    return RuleState.uses


def runs_while_tracing(function: Callable) -> Callable:
    """Marks a function that ``torch.compile`` runs while it traces, with constants as arguments.

    It does what ``torch.compiler.assume_constant_result`` does, without importing the whole compiler.
    """
    function.__dict__["_dynamo_marked_constant"] = True
    return function


def skip_alone(function: AnyFunction) -> AnyFunction:
    """Marks a function that the compiler is to trace only where it traces the caller too.

    Where it leaves a caller to eager mode it compiles what that calls alone, and a function that asks there
    would be told that all of it is compiled.
    """
    frames = torch._C._dynamo.eval_frame
    skip = frames._FrameAction.SKIP
    frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


@runs_while_tracing
def _count_while_tracing(key: str, location: str) -> None:
    _MET_IN_COMPILED_CODE.add(key)
    state = _STATES.get(key)
    if state is not None:
        state.matched[location] += 1
        state.compiled = True


@runs_while_tracing
def _note_discrete_while_tracing(key: str, operation: str) -> None:
    _DISCRETE_IN_COMPILED_CODE.add(key)
    state = _STATES.get(key)
    if state is not None:
        state.discrete.add(operation)


@runs_while_tracing
def warn_of_uncarried(subject: str, message: str, keys: tuple[str, ...]) -> None:
    """Says at the end of a block in compiled code which results never became floating-point there."""
    for key in keys:
        if key in _DISCRETE_IN_COMPILED_CODE and key not in _MET_IN_COMPILED_CODE:
            warn_user(f"{subject}: the result of {key.partition(': ')[0]!r} {message}")


@runs_while_tracing
def _note_forward_while_tracing(key: str) -> None:
    state = _STATES.get(key)
    if state is not None:
        state._note_forward()
        state.traced = True


@runs_while_tracing
def _note_while_tracing(key: str, kind: str, what: str) -> None:
    state = _STATES.get(key)
    if state is not None:
        getattr(state, kind).add(what)


@runs_while_tracing
def _note_opaque_while_tracing(key: str, name: str, call: str, reason: str) -> None:
    state = _STATES.get(key)
    if state is not None:
        state._note_opaque(call, reason)
    else:
        _warn_of_opaque(name, call, reason)


@runs_while_tracing
def _warn_of_lost_path(policy: str, operation: str, function: str, is_index: bool) -> None:
    if is_index:
        text = (
            f"an index from operation {operation!r} became numbers in {function}, and an index has no "
            "gradient: use the values that the operation gives, F.one_hot(x.argmax(-1), n) with a rule for "
            "'argmax', or detach the index (.detach()) if no gradient is meant"
        )
    else:
        text = (
            f"the result of operation {operation!r} went through {function}, which cannot carry the rule's "
            "gradient; cast it to floating point before (.float()), or detach it if no gradient is meant"
        )
    warn_user(f"{policy}{text}")


def _warn_of_opaque(name: str, call: str, reason: str) -> None:
    warn_user(f"policy {name!r} cannot see into {call}: {reason}")


def _number(value: float) -> Tensor:
    return torch.tensor(float(value), dtype=torch.float64)


def _add_squares(total: Tensor | None, tensors: Iterable[Tensor | None]) -> Tensor | None:
    for tensor in tensors:
        if tensor is not None:
            precise = torch.promote_types(tensor.dtype, torch.float32)
            square = torch.linalg.vector_norm(tensor, dtype=precise) ** 2
            total = square if total is None else total + square
    return total


def _was_broadcast(tensor: Tensor, output: Any, gradient: Tensor) -> bool:
    if not isinstance(output, Tensor) or gradient.shape != output.shape:
        return False
    return broadcasts(tensor.shape, output.shape)


def _kind(value: Any) -> str:
    return f"a tensor of shape {_shapes(value)}" if isinstance(value, Tensor) else type(value).__name__


def _shapes(value: Any) -> str:
    """The shape of a tensor, or those of a tuple's tensors, for messages."""
    if isinstance(value, Tensor):
        return str(tuple(value.shape))
    return f"({', '.join(_shapes(item) if isinstance(item, Tensor) else str(item) for item in value)})"
