"""Updates each parameter as soon as its gradient is complete, and frees the gradient."""

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradpolicy.errors import PolicyError
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.optimizers import plain_optimizers
from gradpolicy.optim.update_rules import is_torchs_own, rule_for
from gradpolicy.policies import Freeze, Policy
from gradpolicy.tensors.sharding import is_sharded
from gradpolicy.train.optimizer_steps import parameters_of

OPTION = "step_in_backward"


def update_in_backward(
    optimizers: Sequence[MaskedOptimizer], policies: Mapping[str, Policy], *, allow_closures: bool = False
) -> list[RemovableHandle]:
    """Update each parameter in the backward pass, as soon as its gradient is complete.

    The optimizer's ``step()`` ends the update: it counts it, and updates parameters whose gradients were set
    in another way.

    Args:
        optimizers: The optimizers.
        policies: The policies of the run, by name.
        allow_closures: False to refuse a step with a closure.

    Returns:
        The handles of the hooks. Without them parameters are updated in ``step()`` only.

    Raises:
        PolicyError: If an optimizer counts the updates of all its parameters together, a mask source needs
            gradients, or ranks would diverge; in the backward pass, if a gradient is accumulated after its
            parameter was updated.
    """
    _check_processes(optimizers)
    _check_optimizers(optimizers)
    _check_sources(policies)
    updated: set[Tensor] = set()

    def update(optimizer: MaskedOptimizer, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in updated:
            raise PolicyError(
                f"{OPTION}: a parameter got a second gradient in one update; expected one backward pass for "
                "each step() and no reentrant checkpoints of one weight, since gradients are not accumulated"
            )
        updated.add(parameter)
        optimizer.step_parameter(parameter)
        parameter.grad = None

    @torch.compiler.disable
    def before_step(optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        (closure,) = (*arguments[1:], *named.values()) or (None,)
        if closure is not None and not allow_closures:
            raise refused("a closure", "backward() before step()")
        if getattr(optimizer, "grad_scale", None) is not None:
            raise refused("GradScaler", "training in bfloat16 or float32")

    @torch.compiler.disable
    def after_step(optimizer: Any, *_: Any) -> None:
        updated.difference_update(parameters_of(optimizer))

    handles: list[RemovableHandle] = []
    for each in optimizers:
        each.sees_loss_scale = True
        handles += [each.register_step_pre_hook(before_step), each.register_step_post_hook(after_step)]
        for parameter in parameters_of(each):
            hook = torch.compiler.disable(partial(update, each))
            trains = parameter.requires_grad
            # Torch takes hooks only of tensors that require a gradient.
            handles.append(parameter.requires_grad_().register_post_accumulate_grad_hook(hook))
            parameter.requires_grad_(trains)
    return handles


def refused(found: str, expected: str) -> PolicyError:
    """Return the error for a setting that needs all gradients at once."""
    return PolicyError(
        f"{OPTION}=True: found {found}, which needs all gradients at once; expected {expected}"
    )


def _check_processes(optimizers: Iterable[MaskedOptimizer]) -> None:
    """Check that gradients are averaged over the ranks before they are complete, as under FSDP2."""
    sharded = all(is_sharded(parameter) for each in optimizers for parameter in parameters_of(each))
    several = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
    if several and not sharded:
        raise PolicyError(
            f"{OPTION}=True: found several processes without FSDP2; parameters would be updated before their "
            "gradients are averaged, and the ranks would diverge; expected one process or fully_shard"
        )


def _check_optimizers(optimizers: Iterable[MaskedOptimizer]) -> None:
    for each in plain_optimizers(optimizers):
        rule = rule_for(each)
        counts_together = not is_torchs_own(each) if rule is None else rule.counts_in_group
        if counts_together:
            raise PolicyError(
                f"{OPTION}=True: found {type(each).__name__}, which may count the updates of all its "
                "parameters together; expected an optimizer of torch.optim other than LBFGS, or one with an "
                "update rule that counts for each parameter"
            )


def _check_sources(policies: Mapping[str, Policy]) -> None:
    for name, policy in policies.items():
        if isinstance(policy, Freeze) and policy.mask.needs_gradients:
            raise PolicyError(
                f"policy.{name}: {type(policy.mask).__name__} compares gradients before the step, and "
                f"{OPTION}=True has freed them by then; choose another mask source, or leave the option out"
            )
