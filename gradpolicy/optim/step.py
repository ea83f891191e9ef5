"""One update: by the wrapped optimizer, by its rule, or put back."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError
from gradpolicy.optim import moving
from gradpolicy.optim.masked_parameter import MaskedParameter, Mode
from gradpolicy.optim.own_settings import applied, places_of, with_settings
from gradpolicy.optim.put_back import restore_frozen, save_frozen
from gradpolicy.optim.shapes import local_entries
from gradpolicy.optim.submatrix import in_parts
from gradpolicy.optim.update_rules import Group, UpdateRule
from gradpolicy.optim.update_rules.sgd import begin_momenta
from gradpolicy.optim.wrapped import Wrapped

Member = tuple[MaskedParameter, Tensor]
"""A parameter and its gradient."""


@dataclass(slots=True)
class _Work:
    """The work of one step.

    Attributes:
        by_rule: Parameters that the update rule moves, with their gradients, by param group.
        by_part: Parameters whose active rows or columns the wrapped optimizer updates, with their gradients.
        by_optimizer: Masked parameters that the wrapped optimizer updates.
        on_others: Masked parameters that only other processes update.
        hidden: Parameters whose gradients the wrapped optimizer must not apply.
    """

    by_rule: list[tuple[Group, list[Member]]] = field(default_factory=list)
    by_part: list[Member] = field(default_factory=list)
    by_optimizer: list[MaskedParameter] = field(default_factory=list)
    on_others: list[MaskedParameter] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)


def update(
    wrapped: Wrapped,
    parts: Sequence[Wrapped],
    masked: Mapping[Tensor, MaskedParameter],
    scaling: Mapping[str, Any],
    closure: Callable[[], Any] | None = None,
) -> Any:
    """Update once: by the wrapped optimizer where that is exact, then by the rule for the rest.

    Args:
        wrapped: The wrapped optimizer.
        parts: The optimizers that it consists of, or it alone.
        masked: The parameters that have, or once had, a mask.
        scaling: What GradScaler has set on the masked optimizer.
        closure: Passed to the wrapped optimizer, which then makes the gradients itself.

    Returns:
        The result of the wrapped optimizer's step.

    Raises:
        PolicyError: If a gradient is sparse.
    """
    work = _sorted(wrapped, masked, closure is not None)
    given = scaling.get("grad_scale")
    scale = 1.0 if given is None else float(given)
    stepped = masked.values() if wrapped.needs_closure else work.by_optimizer
    with ExitStack() as stack:
        stack.enter_context(_hidden_gradients(work.hidden))
        stack.enter_context(_passed_on(scaling, wrapped.optimizer))
        for part in parts:
            stack.enter_context(in_parts(part, [m for m in work.by_part if m[0].state.wrapped is part]))
        saved = [(each, save_frozen(each)) for each in stepped if not each.is_full]
        for part in parts:
            if isinstance(part.optimizer, torch.optim.SGD):
                begin_momenta(part.optimizer, part.group_of, scale)
            stack.enter_context(applied(part.optimizer, part.settings))
        step = wrapped.optimizer.step
        result = step(closure) if closure is not None else step()
    for each, values in saved:
        restore_frozen(each, values)
    for each in (*work.by_optimizer, *(each for each, _ in work.by_part)):
        each.count_update()
    for each in work.on_others:
        each.set_count(each.updates + 1)
    for part in parts:
        # A param group is of one optimizer.
        groups = [(g, m) for g, m in work.by_rule if m[0][0].state.wrapped is part]
        if part.rule is not None and groups:
            _by_rule(part.rule, groups, scale)
    return result


def refuse_sparse(gradient: Tensor, name: str) -> None:
    """Check that a gradient is dense.

    Raises:
        PolicyError: If it is not.
    """
    if gradient.layout is not torch.strided:
        raise PolicyError(
            f"{name} has a sparse gradient; MaskedOptimizer needs dense ones "
            "(for an embedding: sparse=False, and a mask of rows)"
        )


def _sorted(wrapped: Wrapped, masked: Mapping[Tensor, MaskedParameter], makes_gradients: bool) -> _Work:
    """Sort masked parameters by how this step treats them."""
    work = _Work()
    for group in wrapped.optimizer.param_groups:
        members: list[Member] = []
        for parameter in group["params"]:
            gradient, each = parameter.grad, masked.get(parameter)
            if gradient is not None and gradient.layout is not torch.strided:
                refuse_sparse(gradient, wrapped.name_of(parameter))
            if each is None:
                continue
            mode = each.mode
            if mode is Mode.PLAIN or mode is Mode.PUT_BACK:
                if gradient is not None or makes_gradients:
                    work.by_optimizer.append(each)
            elif gradient is not None:
                work.hidden.append(parameter)
                if mode is Mode.BY_RULE:
                    members.append((each, gradient))
                elif mode is Mode.BY_PART:
                    work.by_part.append((each, gradient))
                elif mode is Mode.ON_OTHERS:
                    work.on_others.append(each)
        for settings, places in places_of([m.parameter for m, _ in members], wrapped.settings).items():
            work.by_rule.append((with_settings(group, settings), [members[place] for place in places]))
    return work


# --- by rule


def _by_rule(rule: UpdateRule, groups: list[tuple[Group, list[Member]]], scale: float) -> None:
    """Update the active entries of parameters by the rule, and count the update."""
    steps: list[Tensor] = []
    for group, members in groups:
        together: dict[tuple[torch.dtype, torch.device], list[Member]] = {}
        for member in members:
            parameter = member[0].parameter
            together.setdefault((parameter.dtype, parameter.device), []).append(member)
        for alike in together.values():
            moving.update(rule, group, scale, [_entries(group, *member) for member in alike])
        counts = rule.tensor_state(group, 0).keys()
        for masked, _ in members:
            masked.count_update()
            if counts - {"step"}:
                masked.state.set_count(masked.updates)
            elif counts:
                steps.append(masked.state.values["step"])
    if steps:
        # On a CPU a Python number would be converted to a tensor for each of them.
        on_cpu = all(step.is_cpu for step in steps)
        torch._foreach_add_(steps, torch.tensor(1.0, device="cpu") if on_cpu else 1.0)
    # Autograd must detect that values it may have saved have changed.
    torch.autograd.graph.increment_version([m.parameter for _, members in groups for m, _ in members])


def _entries(group: Group, masked: MaskedParameter, gradient: Tensor) -> moving.Entries:
    masked.follow()
    return moving.Entries(
        local_entries(masked.parameter),
        local_entries(gradient),
        masked.state.completed(group, masked.ages, masked.updates),
        masked.ages,
        masked.updates if masked.options.bias_correction == "tensor" else None,
        masked.weights,
    )


# --- while the wrapped optimizer acts


@contextmanager
def _hidden_gradients(parameters: Iterable[Tensor]) -> Iterator[None]:
    """Hide the gradients of parameters in the block."""
    gradients = [(parameter, parameter.grad) for parameter in parameters]
    try:
        for parameter, _ in gradients:
            parameter.grad = None
        yield
    finally:
        for parameter, gradient in gradients:
            parameter.grad = gradient


@contextmanager
def _passed_on(scaling: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Set attributes of an optimizer in the block."""
    try:
        for name, value in scaling.items():
            setattr(optimizer, name, value)
        yield
    finally:
        for name in scaling:
            delattr(optimizer, name)


@torch.no_grad()
def switch(masking: Any, name: str) -> None:
    """Call the `train` or `eval` of the wrapped optimizers that have it; frozen entries do not change."""
    state, masked = masking.state, masking.masked
    switched = [each.optimizer for each in masking._parts if hasattr(each.optimizer, name)]
    if not switched:
        return
    before = {p: p.detach().clone() for p, each in masked.items() if not each.is_full}
    dense = {p: masked[p].state.dense(masked[p].ages) if p in masked else own for p, own in state.items()}
    for each in switched:
        each.state = defaultdict(dict, dense)
        getattr(each, name)()
        each.state = state
    for parameter, value in before.items():
        parameter.copy_(torch.where(masked[parameter].mask(), parameter, value))
