"""The ``Freezer``, which sets masks and settings in the optimizers at each update."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from gradpolicy.errors import under
from gradpolicy.freezing.bindings import Bindings
from gradpolicy.freezing.bound_policy import BoundPolicy, evaluated, masks_never_change
from gradpolicy.freezing.combined import CombinedMasks, ParameterSettings
from gradpolicy.freezing.moving_parts import StillModules
from gradpolicy.freezing.requires_grad import ComputedGradients
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.policies import Freeze, Train
from gradpolicy.rates import Rates
from gradpolicy.tensors.mask import Mask, active_share, as_tensor
from gradpolicy.tensors.sharding import finite_everywhere
from gradpolicy.what_trains import Layers, what_trains


class MaskObserver(Protocol):
    """An object in :attr:`Freezer.observers`, which is called when masks change."""

    def before_masks(self, names: Collection[str]) -> None:
        """Handle parameters whose masks are about to be set, possibly to the same values."""

    def after_masks(self, names: Collection[str]) -> None:
        """Handle parameters whose masks are set, after sources have modified the weights."""


class Freezer:
    """Applies the policies that act in the optimizer: freeze policies and rates.

    For each update a training loop calls :meth:`begin_step` before the first forward pass, and
    :meth:`observe` between the backward pass and clipping. Masks and settings change only in
    :meth:`begin_step`, and only if the number of effective steps has increased, so not while gradients are
    accumulated nor after a skipped step.

    Args:
        model: The model.
        optimizers: The optimizers of its parameters; None: for a plan, as if all parameters were in one.
        policies: The freeze policies by name.
        rates: The policies that set learning rates and other settings of single parameters, by name.
        seed: The seed of mask sources without their own seed.
        toggle_requires_grad: Disable ``requires_grad`` of tensors that are frozen completely, unless a source
            needs their gradients, so that the backward pass skips them. In compiled modules each set of them
            is compiled once. Use False under DistributedDataParallel, whose set of parameters is fixed, and
            if one compiled function is the training step.
        idle: The names of parameters without a gradient, which make no layer.

    Attributes:
        all_policies: The names of all policies.
        parameters: The parameters that freeze policies restrict, by name.
        dropped: Parameters whose gradients are computed in this update, but dropped like those of updates in
            which ``requires_grad`` is disabled.
        counted_layers: Returns the layers, or other groups of parameters, that each policy counts.
        may_change: True if masks may change after the first update.
        observers: Objects that are called when masks change.

    Raises:
        PolicyError: If a pattern matches nothing, no optimizer has the matched parameters, two policies have
            the same source, or two policies require different optimizer state for one parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[MaskedOptimizer] | None,
        policies: Mapping[str, Freeze],
        *,
        rates: Mapping[str, Rates] | None = None,
        seed: int = 0,
        toggle_requires_grad: bool = True,
        idle: Collection[str] = (),
    ) -> None:
        self.optimizers, rates = list(optimizers or ()), dict(rates or {})
        self.observers: list[MaskObserver] = []
        self.all_policies = {*policies, *rates}
        self._bindings = Bindings(model, optimizers, policies, rates, seed, idle)
        self.parameters = self._bindings.parameters
        self.counted_layers = self._bindings.counted_layers
        self.may_change = not all(map(masks_never_change, policies.values()))
        self._masks = CombinedMasks(self._bindings)
        self._settings = ParameterSettings(self._bindings)
        optimized = self._bindings.optimized.values()
        self._gradients = ComputedGradients(model, optimized, toggle=toggle_requires_grad)
        self.dropped = self._gradients.dropped
        self._still = StillModules(model)
        # The step whose masks are set; None before the first step and after loading a state.
        self._step: int | None = None
        # The current step and epoch.
        self._now = (0, 0)

    # ---- an update

    @torch.no_grad()
    def begin_step(self, step: int, epoch: int = 0, phase: str = "fit") -> bool:
        """Set the masks of an effective step. Another call with the same step has no effect.

        Args:
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.
            phase: The current phase.

        Returns:
            True if masks have changed.
        """
        if step == self._step:
            return False
        self._bindings.check_optimizers()
        asked = [each for each in self.policies.values() if each.asks(step, epoch, phase)]
        with self._bindings.gathered(values=any(each.source.reads_weights for each in asked)):
            changed, applied = self._begin_step(step, epoch, phase)
        writing = [each for each in (*asked, *applied) if each.source.writes_weights]
        written = {parameter for each in writing for parameter in each.parameters.values()}
        for optimizer in self.optimizers:
            optimizer.masks_set_at, optimizer.written = optimizer.effective_steps, written
        return changed

    def _begin_step(self, step: int, epoch: int, phase: str) -> tuple[bool, list[BoundPolicy]]:
        self._step, self._now = step, (step, epoch)
        bound = self.policies.values()
        changes = {each.name: each.update(step, epoch, phase) for each in bound}
        changed = set().union(*changes.values()) if self._masks.current else set(self.parameters)
        for each in bound:
            each.source.gathers = bool(each.gradient_names(step, epoch))
        if changed:
            for observer in self.observers:
                observer.before_masks(changed)
            self._masks.update(changed)
            still = evaluated(self._bindings.in_effect, self._masks.current)
            self._still.keep({self.parameters[name] for name in still}, self._bindings.trainable())
        applied = self._masks.apply([each for each in bound if each.in_effect and changes[each.name]])
        self._gradients.update(self._masks.current, self.wanted_gradients(), changed=bool(changed))
        self._settings.update(step, epoch, phase)
        for observer in self.observers if changed else ():
            observer.after_masks(changed)
        return bool(changed), applied

    @torch.no_grad()
    def observe(self, optimizer: MaskedOptimizer) -> None:
        """Process the unscaled and unclipped gradients of an optimizer before its step.

        Sources that need gradients get them, unless a gradient of the optimizer is not finite, in which case
        mixed precision skips the step. Gradients of frozen entries are kept; the update ignores them. Call
        the optimizer's ``mask_gradients`` before you clip or log gradients.
        """
        self._gradients.observe()
        optimized = self._bindings.optimized[optimizer]
        if self.wanted_gradients() and _has_finite_gradients(optimizer):
            for each in self.policies.values():
                each.show(id(optimizer), optimized, *self._now)

    def wanted_gradients(self) -> set[str]:
        """Return the names of parameters whose full gradients mask sources need in the current update."""
        return set().union(*(each.gradient_names(*self._now) for each in self.policies.values()))

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Pass the metrics of a validation to the sources of the policies in effect."""
        for each in self._bindings.in_effect:
            with under(f"policy.{each.name}"):
                each.source.report(metrics)

    def is_finished(self, step: int, epoch: int) -> bool:
        """Return True if a source ends the training after this number of updates and epochs."""
        return any(each.source.is_finished(step, epoch) for each in self._bindings.in_effect)

    def finish(self) -> None:
        """Let sources modify the weights at the end of the training."""
        for each in self._bindings.in_effect:
            each.source.finish()

    def set_again(self) -> None:
        """Set all masks again at the next update."""
        self._masks.current.clear()
        self._step = None

    def compute_all(self) -> bool:
        """Keep ``requires_grad`` enabled, and compute full gradients of all parameters from now on.

        Returns:
            True if some gradients are not computed in the current update.
        """
        return self._gradients.compute_all()

    def restore(self) -> None:
        """Restore ``requires_grad`` and the settings of all parameters. Masks do not change."""
        self._gradients.restore()
        self._still.release()
        self._settings.restore()
        self._step = None
        for each in self.policies.values():
            each.source.release()
            each.source.model = None

    # ---- for reports and other callers

    @property
    def policies(self) -> dict[str, BoundPolicy]:
        """The freeze policies with their parameters and masks, by name."""
        return self._bindings.policies

    @property
    def policy_of(self) -> dict[str, str]:
        """The first policy of each parameter."""
        return {name: policies[0].name for name, policies in self._bindings.policies_of.items()}

    def mask_of(self, name: str) -> Mask:
        """Return the current mask of a parameter: the intersection of the masks of all policies in effect."""
        return self._masks.current.get(name, True)

    def frozen(self) -> set[str]:
        """Return the names of parameters that are frozen completely in the current update."""
        return {name for name, mask in self._masks.current.items() if mask is False}

    def frozen_tensors(self) -> dict[str, set[str]]:
        """Return the names of parameters that each policy freezes completely, now or later."""
        return self._bindings.frozen_tensors()

    def active_share(self, policy: str) -> float:
        """Return the share of the entries of a policy's parameters that train."""
        with self._bindings.gathered():
            parameters = self.policies[policy].parameters
            active = sum(
                p.numel() * active_share(as_tensor(self.mask_of(name), p.shape, p.device))
                for name, p in parameters.items()
            )
            return active / max(sum(p.numel() for p in parameters.values()), 1)

    def what_trains(self, trainable: Collection[str]) -> Layers:
        """Return what trains in the current update, layer by layer.

        Args:
            trainable: The names of the parameters that may train: all others never do.
        """
        bindings = self._bindings
        with bindings.gathered():
            masks = {name: self.mask_of(name) for name in bindings.named if name in trainable}
            return what_trains(
                bindings.named,
                {name: active_share(mask) for name, mask in masks.items()},
                factors={n: each["lr"] for n, each in self._settings.current.items() if "lr" in each},
                still=evaluated(bindings.in_effect, masks),
                matched=set().union(*(each.source.parameters for each in self.policies.values())),
                trains_only_matched=any(isinstance(each.policy, Train) for each in bindings.in_effect),
            )

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sources, and current masks that they cannot compute again.

        The combined masks and the ages are in the optimizer's own state_dict.
        """
        return self._bindings.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        A policy that is not in the state starts from its initial state. So does one whose parameters or class
        of mask source have changed, with a warning. Parameters of saved policies that no longer exist become
        active.
        """
        self._masks.release(self._bindings.load_state_dict(state))
        self.set_again()


def _has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return finite_everywhere(gradient for gradient in gradients if gradient is not None)
