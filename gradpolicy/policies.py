"""The policy classes: each defines where, what and when.

Arguments of a policy's own may be positional; where (``modules``, ``ops``, ``params``) and ``when`` are
keywords.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from gradpolicy.checks import (
    BIAS_CORRECTIONS,
    BUFFERS,
    FROZEN_STATES,
    check_call,
    check_choice,
    check_flag,
    check_number,
)
from gradpolicy.errors import KnowsItsArguments, PolicyError, shown, under
from gradpolicy.flow.locations import RulePlacement
from gradpolicy.flow.operations import find_rule
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.fixed import as_source
from gradpolicy.rules.derivative import Derivative
from gradpolicy.rules.registry import Rule, RuleFunction, get_rule, rule_names
from gradpolicy.when import When
from gradpolicy.where import LOCATIONS, STEP_OPERATIONS, ModulePattern, as_patterns

ModulePatterns = ModulePattern | Iterable[ModulePattern] | None
# In this order, since LightningCLI uses the first type that fits, and so saves a list as a list.
Operations = str | Iterable[str | Callable] | Callable | None
NamePatterns = str | Iterable[str] | None
RuleLike = str | Rule | RuleFunction
# Arguments of an operation or a forward: positions or names.
Arguments = int | str | Iterable[int | str] | None
# Outputs of a module: indices, keys or attributes.
Outputs = int | str | Iterable[int | str] | None
WhenLike = When | Mapping[str, Any] | None
MaskLike = MaskSource | Callable | Tensor | Mapping[str, Tensor] | bool
# A number, or a function of the step (or epoch) count that returns one.
Scheduled = float | Callable[[int], float]
# The same, or a tensor, which may be a parameter.
Factor = Scheduled | Tensor


class Policy(KnowsItsArguments):
    """The base class of all policies.

    Args:
        when: When the policy is active: a :class:`When`, or a mapping of its arguments, as in a config.

    Raises:
        PolicyError: For an unknown argument, or an invalid ``when``.
    """

    def __init__(self, when: WhenLike) -> None:
        if isinstance(when, Mapping):
            when = When(**{str(name): value for name, value in when.items()})
        self.when = when if when is not None else When()
        if not isinstance(self.when, When):
            raise PolicyError(f"{type(self).__name__}: when must be a gradpolicy.When, got {shown(when)}")

    def __repr__(self) -> str:
        when = [] if self.when == When() else [f"when={self.when!r}"]
        text = f"{type(self).__name__}({', '.join([*self.describe(), *when])})"
        # Without the address of functions, which differs in a resumed run.
        return re.sub(r" at 0x[0-9a-f]+", "", text)

    def describe(self) -> list[str]:
        """Return the arguments that distinguish this policy from others of its class, as code."""
        return []


class FlowPolicy(Policy, RulePlacement):
    """Changes the gradient of operations, at module boundaries, or of parameters.

    The arguments determine where it acts:

    - ``ops``: at these operations, in the full model or within ``modules`` only;
    - ``modules`` alone: ``at`` the input or output of these modules, or ``"through"`` them;
    - ``params``: at the gradients of these parameters.

    At an operation a rule replaces the operation's own gradient; ``Scale``, ``Reverse``, ``Clip``, ``Stop``
    and ``UseRule(own=True)`` modify it, for every input.

    Args:
        rule: The rule that computes the gradient there.
        modules: Globs on qualified names, or module classes; a leading ``!`` excludes.
        ops: Names of operations, or torch functions.
        params: Globs on parameter names.
        at: ``"input"``: the gradient that the module passes back; the module's own parameters get their
            ordinary gradient. ``"output"``: the gradient that the module receives, which also affects its
            parameters. ``"through"``: the rule replaces the gradient from the module's output to its input.
        argument: The arguments on which it acts, by name or position (0 is the first): of the operations with
            ``ops``, otherwise of the modules' forward. Default: all.
        output: With ``at="through"``: the outputs whose gradient the rule computes, by index, key or
            attribute. Default: every floating-point one. Other outputs keep their own gradients.
        calls: The calls on which it acts, counted from 0. Default: all. With ``ops``: calls of each operation
            within the forward of each matched module (of the model, if none is named).
        inside: With ``at="through"``: the gradient of the module's own parameters from these outputs:
            ``"none"``, or ``"own"``, their ordinary one.
        when: When the policy is active.

    Raises:
        PolicyError: If no location is given, or the arguments contradict each other.
    """

    INSIDE = ("none", "own")

    # True if at operations it modifies the operation's gradient, for every input, instead of replacing it.
    own = False

    def __init__(
        self,
        rule: Rule,
        *,
        modules: ModulePatterns = None,
        ops: Operations = None,
        params: NamePatterns = None,
        at: str = "input",
        argument: Arguments = None,
        output: Outputs = None,
        inside: str = "none",
        calls: int | Iterable[int] | None = None,
        when: WhenLike = None,
    ) -> None:
        super().__init__(when)
        self.modules = as_patterns(modules)
        self.ops = as_patterns(ops)
        self.params = as_patterns(params)
        self.at = at
        self.argument = as_patterns(argument)
        self.output = as_patterns(output)
        self.inside = inside
        self.calls = as_patterns(calls)
        self.rule = replace(rule, own=True) if self.own and self.ops else rule
        self._check()

    def _check(self) -> None:
        """Check the arguments on their own, and whether they go together.

        Raises:
            PolicyError: If they do not.
        """
        kind, rule = type(self).__name__, shown(self.rule.name)
        check_choice(f"{kind}.at", self.at, LOCATIONS, kind="boundary")
        check_choice(f"{kind}.inside", self.inside, self.INSIDE, kind="choice")
        for key, values in (("argument", self.argument), ("output", self.output)):
            for value in values:
                if isinstance(value, bool) or not isinstance(value, int | str):
                    raise PolicyError(f"{kind}.{key}: expected a name or a number, got {shown(value)}")
        for call in self.calls:
            if isinstance(call, bool) or not isinstance(call, int) or call < 0:
                raise PolicyError(f"{kind}.calls: expected integers of at least 0, got {shown(call)}")
        for operation in self.ops:
            if not (isinstance(operation, str) or callable(operation)):
                raise PolicyError(
                    f"{kind}.ops: an operation is a name or a torch function, got {shown(operation)}"
                )
        through = self.at == "through"
        negative = [value for value in self.argument if isinstance(value, int) and value < 0]
        filters = self.ops and self.argument and self.rule.gradient_filter is not None
        missing = self.rule.missing_parameters()
        refused = {
            f": rule {rule} changes operations' own gradients (own=True): name the operations (ops=)": (
                self.rule.own and not self.ops
            ),
            f": rule {rule} asks for operations' own derivatives: name the operations (ops=)": (
                self.rule.name == "nan_safe" and not self.ops
            ),
            f".argument: positions count from 0, got {next(iter(negative), 0)}": negative,
            ".argument: is of the input, and at='output' means the other side": (
                self.argument and self.at == "output"
            ),
            ".output: goes with at='through'": self.output and not through,
            ".inside: goes with at='through'": self.inside != self.INSIDE[0] and not through,
            ": at='through' goes with modules= alone, not with ops= or params=": (
                through and (self.ops or self.params)
            ),
            ": argument= goes with modules= or ops=, not with params=": self.argument and self.params,
            f".argument: rule {rule} filters the incoming gradient, before there is one for each argument; "
            "use a rule that modifies the operation's own gradients (own=True)": filters,
            ": say where it acts: modules=, ops= or params=": not (self.modules or self.ops or self.params),
            ": params= stands alone; it cannot go with modules= or ops=": (
                self.params and (self.ops or self.modules)
            ),
            ".calls: goes with ops=, whose calls are meant": self.calls and not self.ops,
            f": rule {rule} needs a value for {', '.join(missing)}": missing,
        }
        for message, is_wrong in refused.items():
            if is_wrong:
                raise PolicyError(f"{kind}{message}")

    def describe(self) -> list[str]:
        """Return the arguments that distinguish this policy from others of its class, as code."""
        parameters = [f"{key}={_described(value)}" for key, value in self.rule.parameters.items()]
        where = []
        for key in ("modules", "ops", "params", "at", "argument", "output", "inside", "calls"):
            value = getattr(self, key)
            if value in ((), LOCATIONS[0], self.INSIDE[0]):
                continue
            if isinstance(value, tuple):
                names = [getattr(item, "__name__", item) for item in value]
                value = names[0] if key == "argument" and len(names) == 1 else names
            where.append(f"{key}={value!r}")
        return [f"rule={self.rule.name!r}", *parameters, *where]


class Stop(FlowPolicy):
    """Stops the gradient: ``grad_input = 0``; at operations for every input.

    Args:
        mode: ``"detach"`` cuts the graph, so that its backward pass is skipped; parameters that are reached
            in no other way get no gradient (``None``). ``"zero"`` keeps the graph and passes exact zeros.
        **where_and_when: See :class:`FlowPolicy`.

    Example:
        >>> from torch import nn, ones
        >>> import gradpolicy as gp
        >>> model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
        >>> with gp.install(model, [gp.Stop(modules="1")]):
        ...     model(ones(1, 2)).sum().backward()
        >>> model[0].weight.grad is None, model[1].weight.grad is None
        (True, False)
    """

    MODES = ("detach", "zero")
    own = True

    def __init__(self, mode: str = "detach", **where_and_when: Any) -> None:
        self.mode = check_choice("Stop.mode", mode, self.MODES, kind="mode")
        super().__init__(get_rule("stop"), **where_and_when)
        self.detaches = mode == "detach"

    def describe(self) -> list[str]:
        """Return the arguments that distinguish this policy from others of its class, as code."""
        return [f"mode={self.mode!r}", *super().describe()]


class StraightThrough(FlowPolicy):
    """Gives step functions, or modules, the gradient of a surrogate; forward values do not change.

    ``StraightThrough(modules="quantizer")`` acts across the module: the gradient passes from its output to
    its input, and the module's own parameters get none (see ``inside`` of :class:`FlowPolicy`). If several
    inputs of an operation or a module need a gradient, ``argument`` names the one that gets it.

    Args:
        surrogate: The rule: ``identity``, ``hardtanh``, ``tanh``, ``sigmoid``, ``fast_sigmoid``, ``arctan``,
            ``triangular``, ``approx_sign``, ``swish_sign`` or any other rule.
        parameters: Values for the rule's arguments.
        modules: Modules: with ``ops``, those in which the operations run; without, those that are skipped.
        ops: The operations. Default without ``modules``: every ``round``, ``floor``, ``ceil``, ``trunc``,
            ``sign`` and ``heaviside`` of the model.
        at: As for :class:`FlowPolicy`; default with ``modules`` alone: ``"through"``.
        **where_and_when: See :class:`FlowPolicy`.

    Source: Bengio, Léonard, Courville 2013, arXiv:1308.3432.
    """

    def __init__(
        self,
        surrogate: RuleLike = "identity",
        *,
        parameters: Mapping[str, Any] | None = None,
        modules: ModulePatterns = None,
        ops: Operations = None,
        at: str | None = None,
        **where_and_when: Any,
    ) -> None:
        rule = _chosen_rule("StraightThrough.surrogate", surrogate, parameters)
        if at is None:
            at = "through" if modules is not None and ops is None else "input"
        if modules is None and ops is None and where_and_when.get("params") is None:
            ops = STEP_OPERATIONS
        super().__init__(rule, modules=modules, ops=ops, at=at, **where_and_when)


class Guided(FlowPolicy):
    """Guided backpropagation: only positive gradients pass the ReLUs that were active.

    ``grad_input = relu'(input) · max(grad, 0)``; at every ReLU of the model.

    Source: Springenberg et al. 2015, arXiv:1412.6806.
    """

    def __init__(self, *, ops: Operations = ("relu",), **where_and_when: Any) -> None:
        super().__init__(get_rule("guided_relu"), ops=ops, **where_and_when)


class Deconv(FlowPolicy):
    """Deconvnet backpropagation: positive gradients pass every ReLU, whatever its input was.

    ``grad_input = max(grad, 0)``; at every ReLU of the model.

    Source: Zeiler, Fergus 2014, arXiv:1311.2901.
    """

    def __init__(self, *, ops: Operations = ("relu",), **where_and_when: Any) -> None:
        super().__init__(get_rule("deconv_relu"), ops=ops, **where_and_when)


class Scale(FlowPolicy):
    """Multiplies the gradient: ``grad_input = factor · grad``; at operations for every input.

    Args:
        factor: A number; a function of the step (or epoch) count that returns one; or a tensor, such as a
            parameter, whose value at the time of the forward pass is used. The loss does not depend on the
            factor, so a parameter gets a gradient only from a loss on gradients (``create_graph=True``).
        **where_and_when: See :class:`FlowPolicy`.
    """

    own = True

    def __init__(self, factor: Factor, **where_and_when: Any) -> None:
        super().__init__(get_rule("scale", factor=_factor("Scale.factor", factor)), **where_and_when)


class Reverse(FlowPolicy):
    """Reverses the gradient: ``grad_input = −factor · grad``; at operations for every input.

    Args:
        factor: A number; a function of the step (or epoch) count that returns one; or a tensor, such as a
            parameter, whose value at the time of the forward pass is used. The loss does not depend on the
            factor, so a parameter gets a gradient only from a loss on gradients (``create_graph=True``).
        **where_and_when: See :class:`FlowPolicy`.

    Source: Ganin, Lempitsky 2015, arXiv:1409.7495.
    """

    own = True

    def __init__(self, factor: Factor = 1.0, **where_and_when: Any) -> None:
        super().__init__(get_rule("reverse", factor=_factor("Reverse.factor", factor)), **where_and_when)


class Clip(FlowPolicy):
    """Clips the gradient by value or by norm. In fp16 training the bound is multiplied by the loss scale.

    At operations it clips the operation's gradient of each input separately.

    Args:
        value: Every entry is clipped to ``[−value, value]``.
        norm: The gradient is scaled down to this Euclidean norm if its norm is larger.
        per_sample: With ``norm``: clip each sample (index of the first dimension) separately.
        **where_and_when: See :class:`FlowPolicy`.

    Raises:
        PolicyError: Unless exactly one of value and norm is given, as a positive number.
    """

    own = True

    def __init__(
        self,
        *,
        value: float | None = None,
        norm: float | None = None,
        per_sample: bool = False,
        **where_and_when: Any,
    ) -> None:
        if (value is None) == (norm is None):
            raise PolicyError("Clip: give exactly one of value= and norm=")
        key, bound = ("value", value) if norm is None else ("norm", norm)
        bound = check_number(f"Clip.{key}", bound, above=0.0)
        if per_sample and norm is None:
            raise PolicyError("Clip.per_sample: goes with norm=; clipping by value acts on each entry anyway")
        parameters = {"value": bound} if norm is None else {"norm": bound, "per_sample": per_sample}
        super().__init__(get_rule(f"clip_{key}", **parameters), **where_and_when)


class UseRule(FlowPolicy):
    """Applies any rule.

    Args:
        rule: A registered name, a dotted path, a :class:`~gradpolicy.rules.Rule`, a function
            ``(grad, inputs, output)``, or another operation, whose derivative at the same inputs is used. A
            name that is both a rule and an operation means the rule; ``"torch.tanh"`` is the operation.
        parameters: Values for the rule's arguments.
        own: With ``ops``: the rule modifies the operation's own gradients instead of replacing them. The
            function is called as ``(own, inputs, output)`` and returns the gradients of the inputs; ``own``
            is a tuple of the operation's own gradients, one per input, None for an input without one.
        **where_and_when: See :class:`FlowPolicy`.

    Raises:
        PolicyError: With ``own``, if no operation is named, or for a registered rule that replaces gradients.

    Example:
        >>> import torch, gradpolicy as gp
        >>> def swapped(own, inputs, output):
        ...     return own[1], own[0]
        >>> class Product(torch.nn.Module):
        ...     def forward(self, x, y):
        ...         return x * y
        >>> x, y = torch.tensor(2.0, requires_grad=True), torch.tensor(3.0, requires_grad=True)
        >>> with gp.install(model := Product(), [gp.UseRule(swapped, ops=["mul"], own=True)]):
        ...     model(x, y).backward()
        >>> x.grad, y.grad
        (tensor(2.), tensor(3.))
    """

    def __init__(
        self,
        rule: RuleLike,
        *,
        parameters: Mapping[str, Any] | None = None,
        own: bool = False,
        **where_and_when: Any,
    ) -> None:
        chosen = _chosen_rule("UseRule.rule", rule, parameters)
        self.own = own or chosen.own
        if own and not where_and_when.get("ops"):
            raise PolicyError("UseRule.own: goes with ops=, the operations whose own gradients are meant")
        replaces = chosen.name in rule_names() or isinstance(chosen.function, Derivative)
        if self.own and replaces and not (chosen.own or chosen.each):
            raise PolicyError(
                f"UseRule.own: rule {shown(chosen.name)} replaces a gradient; own=True takes a function "
                "(own, inputs, output), or a rule that is registered with own=True"
            )
        super().__init__(chosen, **where_and_when)


class Freeze(Policy):
    """Freezes parameter entries by masks that may change from step to step.

    Parameters that ``params`` does not match are not affected.

    Args:
        mask: A mask source of :mod:`gradpolicy.masks`, a function ``(name, parameter, step) -> mask``, a mask
            tensor, or a dict of masks by parameter name. True = this entry trains. None: nothing trains.
        params: Globs on parameter names; a leading ``!`` excludes.
        frozen_state: What happens to the optimizer state of an entry while it is frozen: ``"keep"``,
            ``"zero"`` or ``"drop"``.
        bias_correction: ``"entry"`` (by each entry's age) or ``"tensor"`` (by the tensor's step count).
        master_weights: Update bfloat16 and float16 parameters as float32, with 16 more bits for each active
            entry.
        buffers: What happens to modules whose parameters it freezes completely: ``"move"`` (nothing: running
            statistics and dropout go on) or ``"eval"`` (they work as in evaluation: they normalise with their
            running statistics, and drop nothing).
        when: When the policy is active; at other times all its parameters train.

    Raises:
        PolicyError: For an unknown frozen_state, bias_correction or buffers, no params, or an invalid mask.

    Example:
        >>> import gradpolicy as gp
        >>> gp.Freeze(params="encoder.*")
        Freeze(Fixed(mask=False), params=['encoder.*'], frozen_state='keep', bias_correction='entry')
    """

    # The mask that None stands for.
    no_mask = False

    def __init__(
        self,
        mask: MaskLike | None = None,
        *,
        params: str | Iterable[str] = "*",
        frozen_state: str = "keep",
        bias_correction: str = "entry",
        master_weights: bool = False,
        buffers: str = "move",
        when: WhenLike = None,
    ) -> None:
        super().__init__(when)
        kind = type(self).__name__
        self.mask = as_source(self.no_mask if mask is None else mask)
        self.params = as_patterns(params)
        if not self.params:
            raise PolicyError(f"{kind}.params: names no parameter; '*' means all of them")
        self.frozen_state = check_choice(f"{kind}.frozen_state", frozen_state, FROZEN_STATES)
        self.bias_correction = check_choice(f"{kind}.bias_correction", bias_correction, BIAS_CORRECTIONS)
        self.master_weights = check_flag(f"{kind}.master_weights", master_weights)
        self.buffers = check_choice(f"{kind}.buffers", buffers, BUFFERS)

    @property
    def restricts(self) -> tuple[str, ...]:
        """The globs of all parameters that have a mask while the policy is active."""
        return self.params

    def describe(self) -> list[str]:
        """Return the arguments that distinguish this policy from others of its class, as code."""
        return [
            repr(self.mask),
            f"params={list(self.params)}",
            f"frozen_state={self.frozen_state!r}",
            f"bias_correction={self.bias_correction!r}",
            # As before there was a choice: checkpoints compare this.
            *(["master_weights=True"] if self.master_weights else []),
            *([f"buffers={self.buffers!r}"] if self.buffers != "move" else []),
        ]


class Train(Freeze):
    """Trains only what it matches, by the mask if there is one; everything else in the model is frozen.

    Several of them add up: an entry trains if one of them lets it train. :class:`Freeze` policies take away
    from that. While no ``Train`` policy is active, as specified by ``when``, they have no effect.

    Args:
        mask: The entries that train in the parameters that ``params`` matches, as for :class:`Freeze`. None:
            all of them.
        params: Globs on parameter names; a leading ``!`` excludes.
        **options: ``frozen_state``, ``bias_correction``, ``master_weights``, ``buffers`` and ``when``, as
            for :class:`Freeze`.

    Raises:
        PolicyError: As :class:`Freeze`.

    Example:
        >>> import torch, gradpolicy as gp
        >>> model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 1))
        >>> before = {name: parameter.clone() for name, parameter in model.named_parameters()}
        >>> optimizer = torch.optim.AdamW(model.parameters())
        >>> with gp.training(model, optimizer, [gp.Train(params="*.bias")]) as optimizer:
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     optimizer.step()
        >>> [name for name, parameter in model.named_parameters() if not parameter.equal(before[name])]
        ['0.bias', '1.bias']
    """

    no_mask = True

    @property
    def restricts(self) -> tuple[str, ...]:
        """The globs of all parameters that have a mask while the policy is active."""
        return ("*",)


def _chosen_rule(key: str, rule: RuleLike, parameters: Mapping[str, Any] | None) -> Rule:
    """Return the rule that an argument names; an error names the argument."""
    with under(key):
        found = find_rule(rule)
    return found.with_parameters(**(parameters or {}))


def _described(value: object) -> str:
    """Return a parameter of a rule as code; for a tensor, which may change, its shape only."""
    if isinstance(value, Tensor):
        return f"{type(value).__name__} of shape {tuple(value.shape)}"
    return repr(value)


def _factor(key: str, value: object) -> Any:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    if callable(value):
        check_call(key, value, 0, takes="the count alone")
        return value
    with suppress(PolicyError):
        return check_number(key, value, least=-math.inf)
    raise PolicyError(
        f"{key}: expected a number, or a function of the step that returns one, or a "
        f"floating-point tensor; got {shown(value)}"
    )
