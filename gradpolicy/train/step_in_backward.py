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


class StepInBackward:
    """Updates each parameter in the backward pass, as soon as its gradient is complete.

    The optimizer's ``step()`` ends the update: it counts it, and updates parameters whose gradients were set
    in another way.

    Args:
        optimizers: The optimizers.
        policies: The policies of the run, by name.
        allow_closures: False to refuse a step with a closure.

    Raises:
        PolicyError: If an optimizer counts the updates of all its parameters together, a mask source needs
            gradients, or ranks would diverge; in the backward pass, if a gradient is accumulated after its
            parameter was updated.
    """

    def __init__(
        self,
        optimizers: Sequence[MaskedOptimizer],
        policies: Mapping[str, Policy],
        *,
        allow_closures: bool = False,
    ) -> None:
        _check_processes(optimizers)
        _check_optimizers(optimizers)
        _check_sources(policies)
        self._allow_closures = allow_closures
        self._updated: set[Tensor] = set()
        self._handles: list[RemovableHandle] = []
        for each in optimizers:
            each.sees_loss_scale = True
            self._handles.append(each.register_step_pre_hook(self._before_step))
            self._handles.append(each.register_step_post_hook(self._after_step))
            for parameter in parameters_of(each):
                update = torch.compiler.disable(partial(self._update, each))
                trains = parameter.requires_grad
                # Torch takes hooks only of tensors that require a gradient.
                self._handles.append(parameter.requires_grad_().register_post_accumulate_grad_hook(update))
                parameter.requires_grad_(trains)

    def remove(self) -> None:
        """Update parameters only in ``step()`` again."""
        while self._handles:
            self._handles.pop().remove()

    def _update(self, optimizer: MaskedOptimizer, parameter: Tensor) -> None:
        if parameter.grad is None:
            return
        if parameter in self._updated:
            raise PolicyError(
                f"{OPTION}: a parameter got a second gradient in one update; expected one backward pass for "
                "each step() and no reentrant checkpoints of one weight, since gradients are not accumulated"
            )
        self._updated.add(parameter)
        optimizer.step_parameter(parameter)
        parameter.grad = None

    @torch.compiler.disable
    def _before_step(self, optimizer: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        (closure,) = (*arguments[1:], *named.values()) or (None,)
        if closure is not None and not self._allow_closures:
            raise refused("a closure", "backward() before step()")
        if getattr(optimizer, "grad_scale", None) is not None:
            raise refused("GradScaler", "training in bfloat16 or float32")

    @torch.compiler.disable
    def _after_step(self, optimizer: MaskedOptimizer, *_: Any) -> None:
        self._updated.difference_update(parameters_of(optimizer))


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
