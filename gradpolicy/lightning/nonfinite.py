"""A callback that finds the module in which a NaN or infinity first appeared."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from gradpolicy.distributed.agreement import of_every_rank
from gradpolicy.errors import FailedRunError
from gradpolicy.finite import all_finite
from gradpolicy.flow.containers import tensors_in
from gradpolicy.lightning.callback import GradientPolicies
from gradpolicy.lightning.trainer_parts import callbacks_of
from gradpolicy.lightning.unobserved import unobserved
from gradpolicy.planning.plan import training_loss
from gradpolicy.policies import FlowPolicy, Freeze, Policy
from gradpolicy.tensors.sharding import is_sharded, local_shard
from gradpolicy.where import match_modules, match_parameters, plain_name


@dataclass(frozen=True)
class Finding:
    """The first module in which a value was not finite.

    Attributes:
        module: The module's qualified name; empty if the value was in no module.
        what: A description of the value.
        policies: The names of the policies on that module; None if no module was looked for.
    """

    module: str
    what: str
    policies: tuple[str, ...] | None = ()

    def __str__(self) -> str:
        if self.policies is None:
            return self.what
        acting = (
            f"policies acting there: {', '.join(self.policies)}" if self.policies else "no policy acts there"
        )
        return f"{self.what} ({acting})"


class StopOnNonFinite(Callback):
    """Ends a run at the first loss (or gradient) that is not finite, and names the module where it arose.

    The batch is run once more, and the output of every module is checked in the order of the computation
    (not under manual optimization, where a training step updates weights).
    Checking the loss synchronises the device once per batch.

    Args:
        gradients: Also check all gradients before each update, so that weights are not updated by a gradient
            that is not finite. Not under fp16, where the loss scaler handles infinities.

    Raises:
        FailedRunError: In training, with the module and the policies on it.
    """

    def __init__(self, *, gradients: bool = True) -> None:
        self.gradients = gradients
        self._batch: tuple[Any, int] | None = None

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        """Store the batch."""
        self._batch = (batch, batch_idx)

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: Tensor) -> None:
        """Check the loss."""
        if not torch.isfinite(loss.detach()).all():
            finding = self._find(trainer, pl_module)
            raise FailedRunError(f"{_moment(trainer)}: the loss is {loss.item()}; {finding}")

    def on_before_optimizer_step(
        self, trainer: Trainer, pl_module: LightningModule, optimizer: torch.optim.Optimizer
    ) -> None:
        """Check the gradients."""
        if not self.gradients or getattr(trainer.precision_plugin, "scaler", None) is not None:
            return
        gradients = [parameter.grad for parameter in pl_module.parameters() if parameter.grad is not None]
        if not all_finite([local_shard(gradient) for gradient in gradients]):
            finding = self._find(trainer, pl_module, backward=True)
            if trainer.world_size > 1 and not any(map(is_sharded, gradients)):
                # Gradients are averaged over the ranks, but each rank has its own batch.
                finding = next((each for each in of_every_rank(finding) if each.module), finding)
            raise FailedRunError(f"{_moment(trainer)}: a gradient is not finite; {finding}")

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Release the batch."""
        self._batch = None

    def _find(self, trainer: Trainer, pl_module: LightningModule, *, backward: bool = False) -> Finding:
        if not pl_module.automatic_optimization:
            what = "training_step optimizes by hand, so it is not run again to find the module"
            return Finding("", what, policies=None)
        return first_nonfinite(pl_module, self._run, _policies(trainer), backward=backward)

    def _run(self, pl_module: nn.Module) -> Tensor:
        assert self._batch is not None
        with unobserved(pl_module):
            return training_loss(pl_module, *self._batch)


def first_nonfinite(
    model: nn.Module,
    run: Callable[[nn.Module], Tensor],
    policies: Mapping[str, Policy] | None = None,
    *,
    backward: bool = False,
) -> Finding:
    """Run a model again and find the first module whose output or gradient is not finite.

    Args:
        model: The model; the gradients of its parameters are not changed.
        run: A function that does the forward pass with the given model and returns the loss.
        policies: The policies by name.
        backward: Also run the backward pass, and check gradients.

    Example:
        >>> class Root(nn.Module):
        ...     def forward(self, x):
        ...         return x.sqrt()
        >>> model = nn.Sequential(nn.Identity(), Root())
        >>> first_nonfinite(model, lambda m: m(-torch.ones(2)).sum()).module
        '1'
    """
    found: list[tuple[str, str]] = []

    def watch(name: str, inputs: Any, output: Any) -> None:
        place = f"module {name!r} ({type(model.get_submodule(name)).__name__})"

        def check(gradient: Tensor) -> None:
            if not _finite(gradient):
                found.append((name, f"first in what the backward of {place} gave"))

        if not _finite(output):
            found.append((name, _described(model.get_submodule(name), place, inputs)))
        for tensor in tensors_in(inputs) if backward else ():
            if tensor.requires_grad:
                tensor.register_hook(check)

    with _hooks(model, watch), torch.set_grad_enabled(backward):
        loss = run(model)
        if backward:
            parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            found += [
                (name.rpartition(".")[0], f"first in the gradient of {plain_name(name)!r}")
                for name, gradient in zip(parameters, gradients, strict=True)
                if gradient is not None and not _finite(gradient)
            ]
    if not found:
        checked = "gradient" if backward else "module's output"
        return Finding("", f"in a second pass over the batch every {checked} is finite")
    name, what = found[0]
    return Finding(name, what, _acting(model, name, policies or {}))


def _described(module: nn.Module, place: str, inputs: Any) -> str:
    """Return a description of the cause of a module output that is the first not to be finite."""
    spoilt = [name for name, value in module.named_parameters() if not _finite(value)]
    if spoilt:
        cause = f"whose {', '.join(spoilt)} an earlier update made non-finite"
        return f"first in the output of {place}, {cause}"
    return (
        f"first in the output of {place}"
        if _finite(inputs)
        else f"the input of {place} is not finite already"
    )


@contextmanager
def _hooks(model: nn.Module, see: Callable[[str, Any, Any], None]) -> Iterator[None]:
    """Call a function with the inputs and output of every module, innermost modules first."""

    def hook(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda module, inputs, output: see(name, inputs, output)

    handles = [module.register_forward_hook(hook(name)) for name, module in model.named_modules() if name]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _policies(trainer: Trainer) -> dict[str, Policy]:
    return {
        name: policy
        for callback in callbacks_of(trainer, GradientPolicies)
        for name, policy in callback.policies.items()
    }


def _acting(model: nn.Module, name: str, policies: Mapping[str, Policy]) -> tuple[str, ...]:
    """Return the policies that act on a module, on one that contains it, or on its parameters."""
    place, acting = plain_name(name), []
    for policy_name, policy in policies.items():
        if isinstance(policy, Freeze | FlowPolicy) and policy.params:
            here = any(
                parameter.startswith(f"{place}.") for parameter in match_parameters(model, policy.params)
            )
        elif isinstance(policy, FlowPolicy) and policy.modules:
            modules = match_modules(model, policy.modules)
            here = any(f"{place}.".startswith(f"{module}.") for module in modules)
        else:
            here = True
        acting += [policy_name] if here else []
    return tuple(acting)


def _finite(value: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(value))


def _moment(trainer: Trainer) -> str:
    rank = f"rank {trainer.global_rank}, " if trainer.world_size > 1 else ""
    return f"{rank}epoch {trainer.current_epoch}, update {trainer.global_step + 1}"
