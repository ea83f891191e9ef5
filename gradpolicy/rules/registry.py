"""The registry of backward rules, and `Call`, the call of an operation."""

import dis
import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from torch import Tensor

from gradpolicy.errors import PolicyError, nearest, shown, unknown
from gradpolicy.imports import import_by_name

# The tensors among the arguments of an operation, in the order of its parameters.
Inputs = tuple[Tensor, ...]
RuleFunction = Callable[..., Any]
GradientFilter = Callable[..., Tensor]
AnyRuleFunction = TypeVar("AnyRuleFunction", bound=RuleFunction)


@dataclass(frozen=True)
class Call:
    """One call of an operation, for rules with a keyword ``call``.

    Args:
        operation: The operation's name, such as ``"softmax"``, whatever the spelling of the call. For
            :func:`gradpolicy.apply` it is the name of the forward, across a module the module's name, and at
            a module's input or output ``"input of module 'head'"``.
        arguments: All arguments of the call by parameter name, including defaults. The first tensor of a
            torch operation is ``"input"``.
        derivative: The operation's own derivative at any inputs, a function
            ``(grad, inputs, output, *, call)`` that returns a gradient for each of them. None elsewhere.
    """

    operation: str
    arguments: Mapping[str, Any] = field(default_factory=dict)
    derivative: RuleFunction | None = None


@dataclass(frozen=True)
class Rule:
    """A backward rule, which replaces the gradient of an operation, or modifies it (``own``).

    ``rule(grad, inputs, output)`` returns the gradient of the operation's input, or a tuple with one gradient
    per input. It never changes the forward value.

    Args:
        name: The registered name, or the function's own name if it is not registered.
        function: ``function(grad, inputs, output, **parameters)``; grad and output are tensors,
            inputs a tuple of tensors. A keyword argument ``call`` is no parameter of the rule: it gets the
            :class:`~gradpolicy.Call` of the operation.
        parameters: Values of the function's keyword arguments.
        gradient_filter: ``gradient_filter(grad, **parameters) -> grad``, if the rule filters the incoming
            gradient and then applies the operation's own backward. Such a rule works for any operation, and
            saves no tensors.
        reads: ``"inputs"``, ``"output"`` or both: the arguments whose values the function reads. The others
            are not saved for the backward pass; the function gets tensors of the same shape instead. If None,
            this is determined from the function's code.
        own: True if the rule *modifies* the operation's own gradients instead of replacing them. The function
            is then called as ``function(own, inputs, output, **parameters)``; ``own`` is a tuple of the
            operation's own gradients, one per input, or None for an input without a gradient.
        each: True if the function modifies a single gradient of any tensor, as ``scale`` does. With ``own``
            it is called once per input, with the gradient of that input.
    """

    name: str
    function: RuleFunction
    parameters: Mapping[str, Any] = field(default_factory=dict)
    gradient_filter: GradientFilter | None = None
    reads: tuple[str, ...] | None = None
    own: bool = False
    each: bool = False
    # True if the function has a keyword ``call``. Compiled code cannot read the signature.
    takes_call: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "takes_call", "call" in inspect.signature(self.function).parameters)
        if self.reads is None:
            object.__setattr__(self, "reads", _names_read(self.function))

    @property
    def is_built_in(self) -> bool:
        """True for a rule of this package."""
        return _origin(self.function)[0].startswith("gradpolicy.rules.")

    @property
    def depends_on_scale(self) -> bool:
        """True if ``rule(a · grad)`` may be other than ``a · rule(grad)`` for an ``a`` above 0."""
        return not self.is_built_in or "loss_scale" in (keyword_names(self.function) or ())

    def __call__(self, grad: Tensor, inputs: Inputs, output: Tensor, call: Call | None = None) -> Any:
        """Apply the rule; `call` is passed to rules with a keyword argument ``call``."""
        keywords = {"call": call} if call is not None and self.takes_call else {}
        return self.function(grad, inputs, output, **self.parameters, **keywords)

    def with_parameters(self, **parameters: Any) -> "Rule":
        """Return this rule with keyword arguments set.

        Raises:
            PolicyError: If the rule has no such argument.
        """
        valid = keyword_names(self.function)
        for name in parameters:
            if valid is not None and name not in valid:
                hint = nearest(name, valid) if valid else "it has none"
                raise PolicyError(f"rule {shown(self.name)} has no parameter {shown(name)}; {hint}")
        return replace(self, parameters={**self.parameters, **parameters})

    def missing_parameters(self) -> list[str]:
        """Return the keyword arguments that have neither a default nor a value."""
        needed = [
            each.name
            for each in _keyword_arguments(self.function)
            if each.kind is each.KEYWORD_ONLY and each.default is each.empty
        ]
        return [name for name in needed if name not in self.parameters]


_RULES: dict[str, Rule] = {}


def rule(
    name: str,
    *,
    gradient_filter: GradientFilter | None = None,
    reads: tuple[str, ...] | None = None,
    own: bool = False,
    each: bool = False,
) -> Callable[[AnyRuleFunction], AnyRuleFunction]:
    """Register a backward rule under a name.

    Args:
        name: The name that configs and :func:`gradient_override` use.
        gradient_filter: See :class:`Rule`.
        reads: See :class:`Rule`.
        own: See :class:`Rule`.
        each: See :class:`Rule`.

    Returns:
        A decorator that returns the function unchanged.

    Raises:
        PolicyError: If another function has the name, or the function cannot take
            ``(grad, inputs, output)``.

    Example:
        >>> @rule("docstring_five_times")
        ... def five_times(grad, inputs, output):
        ...     return 5.0 * grad
        >>> get_rule("docstring_five_times").function is five_times
        True
    """
    if not isinstance(name, str):
        raise PolicyError(f'a rule is registered under a name: write @rule("a_name"), got {shown(name)}')

    def register(function: AnyRuleFunction) -> AnyRuleFunction:
        _check_signature(name, function)
        known = _RULES.get(name)
        if known is not None and _origin(known.function) != _origin(function):
            raise PolicyError(
                f"rule {shown(name)} is already registered, by {'.'.join(_origin(known.function))}"
            )
        _RULES[name] = Rule(name, function, gradient_filter=gradient_filter, reads=reads, own=own, each=each)
        return function

    return register


def get_rule(specification: "str | Rule | RuleFunction", **parameters: Any) -> Rule:
    """Return the rule for a name, a dotted path, a rule or a plain function.

    Args:
        specification: A registered name, a path such as ``"my_package.my_rules.five_times"``, a
            :class:`Rule`, or a function ``(grad, inputs, output)``.
        **parameters: Values for the rule's keyword arguments.

    Raises:
        PolicyError: If there is no such rule, or it has no such parameter.
    """
    found = _find(specification)
    return found.with_parameters(**parameters) if parameters else found


def rule_names() -> list[str]:
    """Return the registered names."""
    return sorted(_RULES)


def unknown_rule(name: str, others: Iterable[str] = ()) -> PolicyError:
    """Return the error for an unknown rule; it lists the nearest names and the rules of other packages.

    Args:
        name: What the user wrote.
        others: Names of what else could have been meant.
    """
    registered = sorted(known.name for known in _RULES.values() if not known.is_built_in)
    hint = "; in a config extensions=[my_rules] names a module of yours that registers rules"
    if registered:
        hint += f"; registered besides the built-in ones: {', '.join(map(repr, registered))}"
    return PolicyError(f"{unknown('rule', name, {*_RULES, *others})}{hint}")


def keyword_names(function: RuleFunction) -> list[str] | None:
    """Return the keyword arguments of a rule's function that are its parameters; None if it takes any."""
    arguments = _keyword_arguments(function)
    takes_any = any(each.kind is each.VAR_KEYWORD for each in arguments)
    return None if takes_any else [each.name for each in arguments]


def _keyword_arguments(function: RuleFunction) -> list[inspect.Parameter]:
    arguments = list(inspect.signature(function).parameters.values())[3:]
    return [each for each in arguments if each.kind is not each.VAR_POSITIONAL and each.name != "call"]


def _find(specification: "str | Rule | RuleFunction") -> Rule:
    if isinstance(specification, Rule):
        return specification
    if callable(specification):
        for known in _RULES.values():
            if known.function is specification:
                return known
        name = getattr(specification, "__name__", type(specification).__name__)
        _check_signature(name, specification)
        return Rule(name, specification)
    if not isinstance(specification, str):
        raise PolicyError(f"a rule is a name, a dotted path or a function, got {shown(specification)}")
    if specification in _RULES:
        return _RULES[specification]
    if "." not in specification:
        raise unknown_rule(specification)
    try:
        imported = import_by_name(specification)
    except PolicyError as error:
        raise PolicyError(f"rule {error}; {nearest(specification, _RULES)}") from error
    return _find(imported)


def _check_signature(name: str, function: RuleFunction) -> None:
    try:
        inspect.signature(function).bind_partial(None, None, None)
    except (TypeError, ValueError) as error:
        raise PolicyError(f"rule {shown(name)} must take (grad, inputs, output): {error}") from error


def _names_read(function: RuleFunction) -> tuple[str, ...]:
    """Return which of ``"inputs"`` and ``"output"`` a function uses; both if its code is not available."""
    code = getattr(function, "__code__", None)
    both = ("inputs", "output")
    if code is None or code.co_argcount < 3 or {"locals", "eval", "exec"} & set(code.co_names):
        return both
    mentioned: set[str] = set()
    for instruction in dis.get_instructions(code):
        names = instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
        mentioned.update(name for name in names if isinstance(name, str))
    named = zip(both, code.co_varnames[1:3], strict=True)
    return tuple(role for role, name in named if name in mentioned or name in code.co_cellvars)


def _origin(function: RuleFunction) -> tuple[str, str]:
    return getattr(function, "__module__", ""), getattr(function, "__qualname__", repr(function))
