"""Operation override: a rule for every call of an operation within a block."""

import copy
import functools
import inspect
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.flow.bound_rule import Binding
from gradpolicy.flow.checkpointing import checkpoints_above, has_graph, may_be_recomputed, refusal
from gradpolicy.flow.operation_rule import OperationRule
from gradpolicy.flow.operations import (
    Function,
    Operation,
    is_operation,
    name_of,
    operation_names,
    resolve_operation,
)
from gradpolicy.flow.traced import MADE, make_once, parts_of, whole
from gradpolicy.flow.unmet import Met, tell
from gradpolicy.flow.unseen import UnseenCall, unseen_calls
from gradpolicy.rules.registry import Rule, RuleFunction, get_rule, rule_names

_is_traced = torch.compiler.is_dynamo_compiling
_modes = torch._C._len_torch_function_stack
_mode_at = torch._C._get_function_stack_at

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
        # Names of operations that a mode further in took.
        self.taken: set[str] = set()

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

    Args:
        rules: The rules.
        strict: Whether an operation that is never met is an error; otherwise it gives a warning.
    """

    # How many checkpoints began around the entry, and whether a backward pass can come.
    checkpoints = 0
    has_graph = True
    # Whether this is what an entry put on the stack; whose the block is, for messages, and how far up it
    # stands; whether it ends where it is left.
    is_entered = False
    owner = "gradient_override"
    frames = 3
    is_whole = True

    def __init__(self, rules: Sequence[CallRule], *, strict: bool = False) -> None:
        super().__init__(make_table(rules))
        self.bindings = {rule.name: rule.binding for rule in rules if isinstance(rule, OperationRule)}
        self.strict = strict
        self._has_told = False

    def __enter__(self) -> "Block":
        # What it has seen and met is one for all entries.
        mode = copy.copy(self)
        mode.is_entered, mode.checkpoints, mode.has_graph = True, checkpoints_above(), has_graph()
        TorchFunctionMode.__enter__(mode)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: Any) -> None:
        mode = _pop_mode()
        if not isinstance(mode, Block) or not mode.is_entered:
            # The compiler put it there.
            return
        tell_those_around({name for name, binding in self.bindings.items() if binding.matched})
        if error is None and mode.has_graph and self.is_whole:
            self.tell_unmet(self.frames)

    def tell_unmet(self, frames: int) -> None:
        """Says once which operations were never met, if anything ran at all.

        Args:
            frames: Where the block stands: how many frames above this one.

        Raises:
            PolicyError: If the block is strict.
        """
        if self._has_told or all(binding.matched for binding in self.bindings.values()):
            return
        met = self._met()
        if met.ran or met.taken or met.without_gradient:
            self._has_told = bool(met.unmet) and not self.strict
            tell(self.owner, met, strict=self.strict, stacklevel=frames)

    def _met(self) -> Met:
        return Met(
            operations=tuple(self.bindings),
            matched={name for name, b in self.bindings.items() if b.matched or b.may_have_met()},
            ran={name_of(function) for function in self.seen},
            without_gradient=set().union(*(b.without_gradient for b in self.bindings.values())),
            taken=self.taken,
            hiding=list(dict.fromkeys(call for b in self.bindings.values() for call in b.unseen)),
        )

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

        block = copy.copy(self)
        block.owner, block.frames = f"gradient_override of {getattr(function, '__name__', function)!r}", 4

        @functools.wraps(function)
        def overridden(*args: Any, **kwargs: Any) -> Any:
            with TracedBlock(block) if torch.compiler.is_compiling() else block:
                return function(*args, **kwargs)

        @functools.wraps(function)
        def overridden_generator(*args: Any, **kwargs: Any) -> Any:
            return (yield from _stepwise(block, function(*args, **kwargs)))

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


def gradient_override(
    overrides: Mapping[str | Function, str | Rule | RuleFunction | Function], *, strict: bool = False
) -> Block:
    """Gives operations another gradient while a block or function runs; forward values stay as they are.

    It holds for operations *created* in the block, whatever their spelling, wherever backward runs. Blocks
    nest: the inner one wins, and what it does not name falls to the outer. Under ``torch.compile`` a block
    may stand around the compiled function, within it, or be the decorator of either.

    An operation that never ran in the block, or only where no gradient is recorded, gives a warning at its
    end, with those near it that did run. Nothing is said where nothing ran, where gradients were off around
    the block, or for what compiled code may have met.

    Args:
        overrides: For each operation (a name or a torch function, see
            :func:`~gradpolicy.flow.operations.resolve_operation`) what takes the place of its gradient: a
            rule's name, a :class:`~gradpolicy.rules.Rule`, a function ``(grad, inputs, output)``, or another
            operation, whose derivative at the same inputs is used. A name that is both a rule and an
            operation (``"tanh"``) means the rule; ``torch.tanh`` means the operation.
        strict: An operation that is not met is an error when the block ends.

    Returns:
        A context manager that is a decorator too.

    Raises:
        PolicyError: For an unknown operation or rule, or one operation named twice; at the end, where
            ``strict``, for an operation that was not met.

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
    if torch.compiler.is_compiling():
        return _traced_block(overrides)
    return Block(_rules_of(overrides.items()), strict=strict)


def _stepwise(block: Block, generator: Generator) -> Generator:
    """Runs each step of a generator in a block; whoever takes what it gives is outside."""
    whole_block, block = block, copy.copy(block)
    block.is_whole = False
    resume = functools.partial(generator.send, None)
    while True:
        try:
            with block:
                item = resume()
        except StopIteration as end:
            result = end.value
            break
        try:
            resume = functools.partial(generator.send, (yield item))
        except GeneratorExit:
            with block:
                generator.close()
            raise
        except BaseException as error:
            resume = functools.partial(generator.throw, error)
    if has_graph():
        whole_block.tell_unmet(4)
    return result


def _traced_block(overrides: Mapping) -> Block:
    parts = tuple([(key, parts_of(value)) for key, value in overrides.items()])
    name = make_once(_block_of_parts, parts)
    if not hasattr(MADE, name):
        raise PolicyError(name)
    return cast(Block, TracedBlock(getattr(MADE, name)))


def _block_of_parts(parts: tuple) -> Block:
    return Block(_rules_of([(key, whole(value)) for key, value in parts]))


def _rules_of(overrides: Iterable[tuple]) -> list[CallRule]:
    pairs: list[tuple[Operation, Binding]] = []
    for key, value in overrides:
        operation = resolve_operation(key)
        if any(operation.name == known.name for known, _ in pairs):
            raise PolicyError(f"gradient_override: operation {operation.name!r} is named twice")
        pairs.append((operation, Binding(operation.name, as_rule(value), is_reported=False)))
    rules: list[CallRule] = [OperationRule(operation, binding) for operation, binding in pairs]
    for operation, binding in pairs:
        rules += unseen_calls([operation], binding)
    return rules


def tell_those_around(operations: set[str]) -> None:
    """Tells the blocks and policies around which operations were taken here, and so did not come to them."""
    for place in range(_modes()):
        mode = _mode_at(place)
        if isinstance(mode, OperationMode):
            mode.taken.update(operations)


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
