"""One step on a copy of a model: gradients, first masks, and remarks."""

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from gradpolicy.errors import PolicyError
from gradpolicy.factors import divided_factors
from gradpolicy.flow import install
from gradpolicy.flow.install import deactivate
from gradpolicy.flow.locations import remarks as flow_remarks
from gradpolicy.flow.policy_report import ReportRow, check_operations
from gradpolicy.freezing import Freezer
from gradpolicy.freezing.moving_parts import copy_buffers, moving_parts, moving_warnings
from gradpolicy.freezing.requires_grad import is_turned_off
from gradpolicy.optim.lost_updates import losing_updates
from gradpolicy.optim.optimizers import plain_optimizers
from gradpolicy.optim.put_back import put_back_remarks
from gradpolicy.policies import FlowPolicy, Freeze, Policy, Stop
from gradpolicy.rates import Rates
from gradpolicy.tensors.mask import active_share
from gradpolicy.where import named_parameters, pick_each, plain_name

Step = Callable[[nn.Module], Tensor]
Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]
Matched = Mapping[str, Mapping[str, nn.Parameter]]
"""The parameters that each policy matches."""
Kind = TypeVar("Kind", bound=Policy)


@dataclass(frozen=True)
class FirstStep:
    """The findings of one step on a copy of the model.

    Attributes:
        policies: The policies by name.
        matched: The parameters that each policy with ``params`` matches.
        parameters: The trainable parameters of the copy.
        gradients: Their gradients; None for a parameter without one.
        report: The rows of the report of flow policies, each active, by policy.
        freezer: Copies of the freeze policies on the copy, with their first masks.
        warnings: Remarks on operations that did not run, on optimizers, and on frozen parts that move.
        losing: Parameters of 16 bits in which updates are lost.
        idle: Parameters that get no gradient in any step, as far as this one tells.
    """

    policies: Mapping[str, Policy]
    matched: Matched
    parameters: Mapping[str, nn.Parameter]
    gradients: Mapping[str, Tensor | None]
    report: Mapping[str, ReportRow]
    freezer: Freezer
    warnings: tuple[str, ...]
    losing: list[str]
    idle: tuple[str, ...]

    def gets_gradient(self, parameter: str) -> bool:
        """Return True if a parameter has a gradient that is not zero in every entry."""
        gradient = self.gradients.get(parameter)
        return gradient is not None and (gradient.is_meta or bool(gradient.any()))

    def vain(self, policy: str) -> list[str]:
        """Return the parameters of a policy that get no gradient, or only zeros, as a stop intends."""
        if isinstance(self.policies[policy], Stop):
            return []
        return [name for name in self.matched[policy] if not self.gets_gradient(name)]


def first_step(
    model: nn.Module,
    policies: Mapping[str, Policy],
    step: Step,
    *,
    seed: int,
    optimizers: Optimizers | None,
) -> FirstStep:
    """Do one step on a copy of the model; the model and the random states do not change.

    Args:
        model: The model.
        policies: The policies by name.
        step: As of :func:`~gradpolicy.plan`.
        seed: As of :func:`~gradpolicy.plan`.
        optimizers: As of :func:`~gradpolicy.plan`.

    Raises:
        PolicyError: If a pattern matches nothing, an operation that a policy names is not called, a source
            cannot mask its parameters, or the optimizer cannot freeze some entries of a tensor.
    """
    params = {name: getattr(policy, "params", ()) for name, policy in policies.items()}
    matched = pick_each(named_parameters(model), {name: globs for name, globs in params.items() if globs})
    flow, freeze = of_kind(policies, FlowPolicy), of_kind(policies, Freeze)
    devices = sorted({each.device.index for each in model.parameters() if each.is_cuda})
    with torch.random.fork_rng(devices=devices):
        duplicate = _duplicate(model, flow)
        optimized = named_parameters(duplicate if optimizers is None else model)
        made = _optimizers(duplicate, optimizers)
        trained_by, losing = plain_optimizers(made), losing_updates(optimized, made)
        divided = divided_factors(policies, optimized, trained_by)
        buffers = copy_buffers(duplicate)
        gradients, report = _flow_report(duplicate, flow, step)
        unmet = list(_unmet(report, duplicate))
        moving = moving_parts(buffers, duplicate)
        parameters = _trainable(duplicate)
        idle = _idle(flow, gradients)
        freezer = _freezer(duplicate, policies, gradients, idle, seed)
    buffered = {name: policy.buffers for name, policy in freeze.items()}
    still = moving_warnings(freezer.frozen_tensors(), moving, parameters, buffered)
    put_back = put_back_remarks(_partly_frozen(freezer), optimized, trained_by)
    remarks = (*unmet, *flow_remarks(flow), *divided, *put_back, *still)
    return FirstStep(policies, matched, parameters, gradients, report, freezer, remarks, losing, idle)


def of_kind(policies: Mapping[str, Policy], kind: type[Kind]) -> dict[str, Kind]:
    """Return the policies of a class."""
    return {name: policy for name, policy in policies.items() if isinstance(policy, kind)}


# ---- the copy, and its optimizers


def _duplicate(model: nn.Module, flow: Mapping[str, FlowPolicy]) -> nn.Module:
    """Return a copy of the model without these policies, and with ``requires_grad`` on again."""
    duplicate = copy.deepcopy(model)
    deactivate(duplicate, flow.values())
    for original, copied in zip(model.parameters(), duplicate.parameters(), strict=True):
        if is_turned_off(original):
            copied.requires_grad_(True)
    return duplicate


def _optimizers(duplicate: nn.Module, given: Optimizers | None) -> list[torch.optim.Optimizer]:
    """Return the given optimizers, or those of a LightningModule."""
    if given is not None:
        return [given] if isinstance(given, torch.optim.Optimizer) else list(given)
    configure: Any = getattr(duplicate, "configure_optimizers", tuple)
    try:
        made = configure()
    except PolicyError:
        raise
    except Exception:
        # Some modules need a Trainer, which does not exist yet; the plan works without optimizers.
        return []
    return [each for each in tree_leaves(made) if isinstance(each, torch.optim.Optimizer)]


# ---- flow policies: one step for training, one for the policies of other phases


def _flow_report(
    model: nn.Module, policies: Mapping[str, FlowPolicy], step: Step
) -> tuple[dict[str, Tensor | None], dict[str, ReportRow]]:
    """Return the gradients, and the report with each policy active."""
    training = {name for name, policy in policies.items() if "fit" in policy.when.phases}
    gradients, report = _observe(model, policies, training, step)
    if others := policies.keys() - training:
        _, report_of_others = _observe(model, policies, others, step)
        report |= {name: report_of_others[name] for name in others}
    return gradients, report


def _observe(
    model: nn.Module, policies: Mapping[str, FlowPolicy], active: Set[str], step: Step
) -> tuple[dict[str, Tensor | None], dict[str, ReportRow]]:
    """Do one step with some of the policies active."""
    entry_point = "training_step" if hasattr(model, "training_step") else "forward"
    installed = install(model, policies, entry_points={"": [entry_point]})
    try:
        for name in policies:
            installed.set_active(name, name in active)
        gradients = _gradients(step(model), _trainable(model))
        return gradients, {row.name: row for row in installed.report().rows}
    finally:
        installed.remove(quiet=True)


def _unmet(report: Mapping[str, ReportRow], model: nn.Module) -> Iterator[str]:
    """Yield a line for each policy whose rule did not act at an operation or location."""
    # An operation without a gradient may get one when layers before it thaw.
    thaws = any(not parameter.requires_grad for parameter in model.parameters())
    for name, row in report.items():
        yield from (f"{name}: {clause}" for clause in row.unseen)
        if row.kind in ("Guided", "Deconv") and row.operations == ("relu",):
            yield from (
                f"{name}: {other} ran there with the plain gradient; if it is a ReLU, name it (ops=…)"
                for other in sorted(row.operations_met & {"maximum", "relu6"})
            )
        if message := check_operations(row, may_get_gradient=thaws):
            yield f"{name}: {message}"


def _gradients(loss: Tensor, parameters: Mapping[str, nn.Parameter]) -> dict[str, Tensor | None]:
    if not (loss.requires_grad and parameters):
        return dict.fromkeys(parameters)
    # Not of chosen tensors, since reentrant checkpoints compute those of all. What the step uses beside the
    # copy keeps its gradient.
    leaves = [node.variable for node in graph_nodes([loss]) if hasattr(node, "variable")]
    kept = {leaf: leaf.grad for leaf in (*leaves, *parameters.values())}
    for leaf in kept:
        leaf.grad = None
    loss.backward()
    found = {name: parameter.grad for name, parameter in parameters.items()}
    for leaf, gradient in kept.items():
        leaf.grad = gradient
    return found


def graph_nodes(tensors: Iterable[Tensor]) -> Iterator[Any]:
    """Yield each node of the autograd graphs of some tensors once."""
    nodes: list[Any] = [tensor.grad_fn for tensor in tensors]
    seen = {None}
    while nodes:
        if (node := nodes.pop()) not in seen:
            seen.add(node)
            nodes += [following for following, _ in node.next_functions]
            yield node


def _idle(flow: Mapping[str, FlowPolicy], gradients: Mapping[str, Tensor | None]) -> tuple[str, ...]:
    """Return the parameters without a gradient; none if a policy may cut them off for some steps only."""
    if any("fit" in each.when.phases and each.when.changes for each in flow.values()):
        return ()
    return tuple(name for name, gradient in gradients.items() if gradient is None)


# ---- freeze policies, with the masks of their first step


def _freezer(
    duplicate: nn.Module,
    policies: Mapping[str, Policy],
    gradients: Mapping[str, Tensor | None],
    idle: Collection[str],
    seed: int,
) -> Freezer:
    """Return the freezer of copies of the policies, each with the masks of its first step.

    Raises:
        PolicyError: If a source cannot mask the parameters of its policy, or policies disagree on the state.
    """
    copies = {name: copy.copy(policy) for name, policy in of_kind(policies, Freeze).items()}
    for each in copies.values():
        each.mask = copy.deepcopy(each.mask)
    rates = of_kind(policies, Rates)
    freezer = Freezer(duplicate, None, copies, rates=rates, seed=seed, toggle_requires_grad=False, idle=idle)
    for bound in freezer.policies.values():
        source, when = bound.source, bound.policy.when
        if source.needs_gradients:
            known = {key: gradients.get(key) for key in source.parameters}
            source.observe({key: gradient for key, gradient in known.items() if gradient is not None})
        bound.update(*((when.start, 0) if when.unit == "step" else (0, when.start)), when.phases[0])
    freezer.begin_step(0)
    return freezer


def _partly_frozen(freezer: Freezer) -> dict[str, list[str]]:
    """Return the names of the parameters of which each policy freezes some entries."""
    return {
        name: [key for key, mask in each.masks.items() if 0.0 < active_share(mask) < 1.0]
        for name, each in freezer.policies.items()
    }


def _trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    named = model.named_parameters()
    return {plain_name(name): parameter for name, parameter in named if parameter.requires_grad}
