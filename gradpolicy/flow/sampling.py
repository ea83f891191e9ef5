"""Draws that are written otherwise than as ``torch.bernoulli``, and the scores behind an index.

Three ways to draw bits are one operation, ``bernoulli``: the function itself, the comparison of a uniform
draw with probabilities, and ``torch.distributions.Bernoulli(p).sample()``, which switches gradients off.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.flow.bound_rule import RuleState
from gradpolicy.flow.operation_tables import Function
from gradpolicy.flow.operations import resolve_operation
from gradpolicy.flow.table_rule import TableRule

_is_compiling = torch.compiler.is_compiling
_UNIFORM = "_gradpolicy_uniform"
_CUT = "_gradpolicy_cut_by_no_grad"

# The code that switches gradients off while it draws.
_SAMPLERS = (torch.distributions.Bernoulli.sample.__code__,)
# Rules that take logits where the operation takes probabilities.
OF_LOGITS = ("gumbel", "reinmax")
# What leaves the values of a draw as they are, on another device or in another shape.
_KEEPS_VALUES = (
    *("to", "type_as", "cpu", "cuda", "float", "double", "clone", "contiguous", "view", "view_as", "reshape"),
    *("flatten", "squeeze", "unsqueeze", "expand", "expand_as", "transpose", "permute"),
)

# Puts the rule on a discrete result, given the operation's inputs and the module that runs.
PutRule = Callable[[Tensor, Sequence[Tensor], str | None], Tensor]


class UniformDraw(TableRule):
    """Marks uniform draws, so that a comparison with one is known.

    Args:
        state: The rule on ``bernoulli``.
    """

    name = "bernoulli"

    def __init__(self, state: RuleState) -> None:
        self.state = state
        self._written = _functions("uniform")
        self._keeps = frozenset(function for name in _KEEPS_VALUES for function in _functions(name))
        self.functions: tuple[Function, ...] = (torch.rand, torch.rand_like, *self._written, *self._keeps)

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled.
        return (UniformDraw, (self.state,))

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the rule is active, and the call draws from 0 to 1, or passes such a draw on."""
        if _is_compiling() or not self.state.active:
            return False
        if function in self._keeps:
            return bool(args) and _is_uniform(args[0])
        if function not in self._written:
            return True
        bounds = {**dict(zip(("from", "to"), args[1:], strict=False)), **kwargs}
        return bounds.get("from", 0) == 0 and bounds.get("to", 1) == 1

    def allows_plain_recomputation(self) -> bool:
        """Whether a checkpoint may rerun the draw without the rule: always, since nothing is changed."""
        return True

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> Any:
        """Makes the draw."""
        result = function(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            setattr(result, _UNIFORM, result._version)
        return result


class ComparedDraw(TableRule):
    """Draws of bits by comparison: ``u < p``.

    Args:
        state: The rule on ``bernoulli``.
        put_rule: Puts it on the bits.
    """

    name = "bernoulli"

    def __init__(self, state: RuleState, put_rule: PutRule) -> None:
        self.state = state
        # Counted together with calls of the function.
        self.calls = state.calls
        self.key = f"{state.name}: {self.name}"
        self.put_rule = put_rule
        self._below = {*_functions("lt"), *_functions("le")}
        self.functions: tuple[Function, ...] = (*self._below, *_functions("gt"), *_functions("ge"))

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled.
        return (ComparedDraw, (self.state, self.put_rule))

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the rule is active, and one side is a uniform draw, or may be one in compiled code."""
        if not self.state.active:
            return False
        first, second = _sides(args, kwargs)
        if _is_compiling():
            return torch.is_grad_enabled() and _may_be_draw(first, second)
        return _is_uniform(first) or _is_uniform(second)

    def allows_plain_recomputation(self) -> bool:
        """Whether a checkpoint may rerun the comparison without the rule."""
        return False

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> Any:
        """Makes the comparison. Its bits are 1 with probability p, or 1 − p for ``u > p``.

        Raises:
            PolicyError: In compiled code, where nobody sees which tensor is a uniform draw.
        """
        if _is_compiling():
            raise PolicyError(
                "a comparison of two tensors in compiled code may be a draw of bits "
                "(torch.rand_like(p) < p), on which a rule for 'bernoulli' cannot be put there: write "
                "torch.bernoulli(p), leave this to eager mode (torch.compiler.disable), or compile without "
                "fullgraph"
            )
        with torch._C.DisableTorchFunction():
            result = function(*args, **kwargs)
            first, second = _sides(args, kwargs)
            draw_is_first = _is_uniform(first)
            probabilities = second if draw_is_first else first
            if not (torch.is_grad_enabled() and getattr(probabilities, "requires_grad", False)):
                self.state.note_without_gradient(self.name)
                return result
            # A comparison in place has floats for bits already, and no way to keep the draw.
            if result.dtype != torch.bool:
                return result
            if (function in self._below) != draw_is_first:
                probabilities = 1 - probabilities
            return self.put_rule(result, [probabilities], module)


class LibraryDraw(TableRule):
    """Leaves gradients on while ``torch.distributions`` draws bits under ``torch.no_grad``.

    Args:
        state: The rule on ``bernoulli``.
    """

    name = "bernoulli"
    functions: tuple[Function, ...] = (torch._C._set_grad_enabled,)

    def __init__(self, state: RuleState) -> None:
        self.state = state

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the rule is active, and the library is about to switch gradients off."""
        return self.state.active and not args[0] and torch.is_grad_enabled() and _is_called_by_sampler()

    def allows_plain_recomputation(self) -> bool:
        """Whether a checkpoint may rerun this: what it is done for checks that itself."""
        return True

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> None:
        """Does nothing, so that gradients stay on."""


class CompiledLibraryDraw(TableRule):
    """Refuses such draws in compiled code, where nobody sees who switched gradients off.

    Args:
        state: The rule on ``bernoulli``.
    """

    name = "bernoulli"

    def __init__(self, state: RuleState) -> None:
        self.state = state
        self._draws = _functions("bernoulli")
        self.functions: tuple[Function, ...] = (*self._draws, Tensor.expand)

    def __reduce__(self) -> tuple:
        # Some torch functions cannot be pickled.
        return (CompiledLibraryDraw, (self.state,))

    def covers(self, function: Function, args: tuple, kwargs: Mapping[str, Any]) -> bool:
        """Whether the rule is active in compiled code that runs without gradients."""
        if not _is_compiling() or not self.state.active or torch.is_grad_enabled():
            return False
        return getattr(args[0], _CUT, False) if function in self._draws else args[0].requires_grad

    def allows_plain_recomputation(self) -> bool:
        """Whether a checkpoint may rerun this: always."""
        return True

    def call(self, function: Function, args: tuple, kwargs: Mapping[str, Any], module: str | None) -> Any:
        """Marks expanded probabilities, as the library draws from them, and refuses a draw from those.

        Raises:
            PolicyError: For the draw.
        """
        if function in self._draws:
            raise PolicyError(
                "operation 'bernoulli' runs under torch.no_grad in compiled code, as in "
                "torch.distributions.Bernoulli.sample, and there a rule cannot be put on it: call "
                "torch.bernoulli(probs), leave the draw to eager mode (torch.compiler.disable), or compile "
                "without fullgraph"
            )
        result = function(*args, **kwargs)
        setattr(result, _CUT, True)
        return result


def draws_of_bits(state: RuleState, put_rule: PutRule) -> list[TableRule]:
    """The entries of a dispatch table for the draws of bits that are not written as ``bernoulli``."""
    return [UniformDraw(state), ComparedDraw(state, put_rule), LibraryDraw(state), CompiledLibraryDraw(state)]


def scores_of_argmax(result: Tensor, input: Tensor, dim: int | None = None, keepdim: bool = False) -> Tensor:
    """The scores that an argmax chose by, in the shape of its one-hot code: categories last."""
    if dim is None:
        return input.reshape(*result.shape, -1)
    scores = input.movedim(dim, -1)
    return scores.unsqueeze(dim if dim >= 0 else dim - 1) if keepdim else scores


def scores_of_draw(result: Tensor, input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """The probabilities that ``torch.multinomial`` drew by, in the shape of the one-hot code."""
    probabilities = input / input.sum(-1, keepdim=True)
    return probabilities.unsqueeze(-2).expand(*result.shape, -1)


def _functions(name: str) -> tuple[Function, ...]:
    return resolve_operation(name).functions


def _sides(args: tuple, kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
    """What a comparison compares."""
    if kwargs:
        args = (*args, *[kwargs[name] for name in ("input", "other") if name in kwargs])
    return args[0], args[1]


def _is_uniform(value: Any) -> bool:
    if not isinstance(value, Tensor):
        return False
    with torch._C.DisableTorchFunction():
        return getattr(value, _UNIFORM, None) == value._version


def _may_be_draw(first: Any, second: Any) -> bool:
    """Whether a tensor that needs a gradient is compared with one that needs none."""
    if not (isinstance(first, Tensor) and isinstance(second, Tensor)):
        return False
    return first.requires_grad != second.requires_grad


def _is_called_by_sampler() -> bool:
    """Whether ``torch.no_grad`` was entered by a sampler: within the few frames that lie between."""
    frame: FrameType | None = sys._getframe(1)
    for _ in range(8):
        if frame is None:
            return False
        if frame.f_code in _SAMPLERS:
            return True
        frame = frame.f_back
    return False
