"""Operation override: a rule for every call of an operation within a block."""

import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow.binding import Binding
from gradpolicy.flow.calls import OperationRule
from gradpolicy.flow.operations import (
    Function,
    Operation,
    is_operation,
    operation_names,
    resolve_operation,
)
from gradpolicy.flow.recomputation import checkpoints_above, has_graph, may_be_recomputed, refusal
from gradpolicy.flow.traced import MADE, make_once, parts_of, whole
from gradpolicy.flow.unseen import UnseenCall, unseen_calls
from gradpolicy.rules.registry import Rule, RuleFunction, get_rule, rule_names

_is_traced = torch.compiler.is_dynamo_compiling

CallRule = OperationRule | UnseenCall
Table = dict[Function, tuple[CallRule, ...]]
AnyFunction = TypeVar("AnyFunction", bound=Callable[..., Any])


class OperationMode(TorchFunctionMode):
    """Sees every torch function, and puts the rules of a table on those that it names."""

    def __init__(self, table: Table) -> None:
        super().__init__()
        self.table = table
        # The functions that ran without a rule for them.
        self.seen: set[Function] = set()

    def check_recomputation(self, operation: str) -> None:
        """Refuses an operation that a checkpoint would run again outside of this mode."""

    def __torch_function__(
        self, func: Function, types: Iterable[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Does the call, with the first rule that is for it and holds now."""
        rules = self.table.get(func)
        if rules is None:
            if not _is_traced():
                self.seen.add(func)
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        for rule in rules:
            if rule.covers(func, args, kwargs):
                if not rule.keeps_what_plain_keeps() and may_be_recomputed():
                    self.check_recomputation(rule.name)
                return rule.call(func, args, kwargs)
        if not _is_traced():
            self.seen.add(func)
        return func(*args, **kwargs)


class Block(OperationMode):
    """What :func:`gradient_override` gives: a context manager, and a decorator.

    Each entry puts a mode of its own on the stack, so that one block may be entered again within itself and
    on several threads. The compiler enters the block itself: it knows how to trace modes, and only these.
    """

    # How many checkpoints began around the entry, and whether a backward pass can come.
    checkpoints = 0
    has_graph = True

    def __enter__(self) -> "Block":
        entered = Block(self.table)
        entered.checkpoints, entered.has_graph = checkpoints_above(), has_graph()
        TorchFunctionMode.__enter__(entered)
        return self

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorates a function, which then always runs in the block; a generator is in it while it runs.

        Raises:
            PolicyError: For a coroutine function, whose waiting would let others run in the block.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            name = getattr(function, "__name__", repr(function))
            raise PolicyError(
                f"gradient_override cannot decorate {name!r}, a coroutine function: what runs while it waits "
                "would be in the block too; enter the block within it, where it does not wait"
            )

        @functools.wraps(function)
        def overridden(*args: Any, **kwargs: Any) -> Any:
            with TracedBlock(self) if torch.compiler.is_compiling() else self:
                return function(*args, **kwargs)

        @functools.wraps(function)
        def overridden_generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _stepwise(self, function(*args, **kwargs)))

        generates = inspect.isgeneratorfunction(function)
        return cast(AnyFunction, overridden_generator if generates else overridden)

    def check_recomputation(self, operation: str) -> None:
        """Refuses an operation that a checkpoint would run again outside of this block."""
        if self.has_graph and checkpoints_above() > self.checkpoints:
            raise refusal(operation)


class TracedBlock:
    """A block in compiled code; where that breaks within it, the compiler leaves all of it to eager mode."""

    def __init__(self, block: Block) -> None:
        self.block = block

    def __enter__(self) -> "TracedBlock":
        TorchFunctionMode.__enter__(self.block)
        return self

    def __exit__(self, *exception: Any) -> None:
        TorchFunctionMode.__exit__(self.block, *exception)

    def __call__(self, function: AnyFunction) -> AnyFunction:
        """Decorates a function that is made in compiled code too."""

        def overridden(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return cast(AnyFunction, overridden)


def gradient_override(overrides: Mapping[str | Function, str | Rule | RuleFunction | Function]) -> Block:
    """Gives operations another gradient while a block or function runs; forward values stay as they are.

    It holds for operations *created* in the block, whatever their spelling, wherever backward runs. Blocks
    nest: the inner one wins, and what it does not name falls to the outer. Under ``torch.compile`` a block
    may stand around the compiled function, within it, or be the decorator of either.

    Args:
        overrides: For each operation (a name or a torch function, see
            :func:`~gradpolicy.flow.operations.resolve_operation`) what takes the place of its gradient: a
            rule's name, a :class:`~gradpolicy.rules.Rule`, a function ``(grad, inputs, output)``, or another
            operation, whose derivative at the same inputs is used. A name that is both a rule and an
            operation (``"tanh"``) means the rule; ``torch.tanh`` means the operation.

    Returns:
        A context manager that is a decorator too.

    Raises:
        PolicyError: For an unknown operation or rule, or one operation named twice.

    Example:
        >>> x = torch.tensor([0.2, 1.7], requires_grad=True)
        >>> with gradient_override({"round": "identity", torch.sign: torch.tanh}):
        ...     y = x.round() + torch.sign(x)
        >>> y.sum().backward()
        >>> x.grad
        tensor([1.9610, 1.1250])
    """
    if not isinstance(overrides, Mapping):
        raise PolicyError(f"gradient_override takes a dict of operation: rule, got {overrides!r}")
    return _traced_block(overrides) if torch.compiler.is_compiling() else Block(_table_of(overrides.items()))


def _stepwise(block: Block, generator: Generator) -> Generator:
    """Runs each step of a generator in a block; whoever takes what it gives is outside."""
    resume = functools.partial(generator.send, None)
    while True:
        try:
            with block:
                item = resume()
        except StopIteration as end:
            return end.value
        try:
            resume = functools.partial(generator.send, (yield item))
        except GeneratorExit:
            with block:
                generator.close()
            raise
        except BaseException as error:
            resume = functools.partial(generator.throw, error)


def _traced_block(overrides: Mapping) -> Block:
    parts = tuple([(key, parts_of(value)) for key, value in overrides.items()])
    name = make_once(_block_of_parts, parts)
    if not hasattr(MADE, name):
        raise PolicyError(name)
    return cast(Block, TracedBlock(getattr(MADE, name)))


def _block_of_parts(parts: tuple) -> Block:
    return Block(_table_of([(key, whole(value)) for key, value in parts]))


def _table_of(overrides: Iterable[tuple]) -> Table:
    pairs: list[tuple[Operation, Binding]] = []
    for key, value in overrides:
        operation = resolve_operation(key)
        if any(operation.name == known.name for known, _ in pairs):
            raise PolicyError(f"gradient_override: operation {operation.name!r} is named twice")
        pairs.append((operation, Binding(operation.name, as_rule(value), is_reported=False)))
    rules: list[CallRule] = [OperationRule(operation, binding) for operation, binding in pairs]
    for operation, binding in pairs:
        rules += unseen_calls([operation], binding)
    return make_table(rules)


def make_table(rules: Iterable[CallRule]) -> Table:
    """Sorts rules under every function that their operations arrive as, in order."""
    table: Table = {}
    for operation_rule in rules:
        for function in operation_rule.functions:
            table[function] = (*table.get(function, ()), operation_rule)
    return table


def as_rule(specification: str | Rule | RuleFunction | Function) -> Rule:
    """The rule that a name, a rule, a function, or another operation means.

    Raises:
        PolicyError: If it is none of them.
    """
    if isinstance(specification, Rule):
        rule = specification
    elif isinstance(specification, str) and specification not in rule_names() and "." not in specification:
        if not is_operation(specification):
            raise unknown("rule or operation", specification, {*rule_names(), *operation_names()})
        rule = derivative_of(resolve_operation(specification))
    elif callable(specification) and is_operation(specification):
        rule = derivative_of(resolve_operation(specification))
    else:
        rule = get_rule(specification)
    missing = rule.missing_parameters()
    if missing:
        raise PolicyError(
            f"rule {rule.name!r} needs a value for {', '.join(missing)}: "
            f"get_rule({rule.name!r}, {missing[0]}=…)"
        )
    return rule


@functools.cache
def derivative_of(operation: Operation) -> Rule:
    """The rule that is another operation's own gradient at the same inputs."""
    return Rule(f"derivative of {operation.name}", OwnDerivative(operation), reads=("inputs",))


class OwnDerivative:
    """``grad · f'(inputs)`` of an operation f; one that takes fewer tensors is given the first ones."""

    def __init__(self, operation: Operation) -> None:
        self.operation = operation

    def __call__(self, grad: Tensor, inputs: tuple[Tensor, ...], output: Tensor) -> tuple:
        """The gradients of the operation's inputs."""
        function = self.operation.functional
        taken = self._accepted(inputs)
        pulled: Any = torch.func.vjp(function, *inputs[:taken])
        value, pull_back = pulled
        if value.shape != grad.shape:
            raise PolicyError(
                f"operation {self.operation.name!r} gives shape {tuple(value.shape)} at the inputs of an "
                f"operation that gives {tuple(grad.shape)}: its gradient cannot be used there"
            )
        return (*pull_back(grad.to(value.dtype)), *[None] * (len(inputs) - taken))

    def _accepted(self, inputs: tuple[Tensor, ...]) -> int:
        if len(inputs) == 1:
            return 1
        meta = [torch.empty_like(tensor, device="meta") for tensor in inputs]
        for count in range(len(inputs), 0, -1):
            try:
                self.operation.functional(*meta[:count])
            except (TypeError, RuntimeError):
                continue
            return count
        raise PolicyError(
            f"operation {self.operation.name!r} takes none of the inputs {[tuple(t.shape) for t in inputs]}"
        )
