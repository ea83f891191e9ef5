"""The engine of freeze policies: asks the sources, combines their masks, hands them to the optimizer.

It knows neither Lightning nor the optimizer's arithmetic. A training loop calls, for each effective step,
``begin_step`` before the first forward pass, ``observe`` between backward pass and clipping, and
``finish_step`` after the update.
"""

import warnings
import weakref
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradpolicy.errors import PolicyError, check_named, nearest, shortened, shown, under
from gradpolicy.freezing.combination import (
    MaskingOptimizer,
    Options,
    check_same_options,
    combine,
    parameter_ids,
    set_masks,
)
from gradpolicy.freezing.freeze_report import FreezeReport, FreezeRow
from gradpolicy.freezing.group_norm import guard_group_norms
from gradpolicy.freezing.missing_gradients import MissingGradients
from gradpolicy.freezing.policy_masks import FreezePolicy, PolicyMasks
from gradpolicy.freezing.requires_grad import FOLLOWS_REQUIRES_GRAD, RequiresGrad, compiled_parameters
from gradpolicy.freezing.scaled_updates import ScaledUpdates, check_proportional
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.function import Adapted
from gradpolicy.tensors.mask import Mask, same_mask
from gradpolicy.tensors.sharding import finite_everywhere
from gradpolicy.where import named_parameters, once_each, pick, plain_name

# Why what a policy lets train may stand still.
_NO_GRADIENT = (
    "no gradient gets there: no loss depends on it, something else turned requires_grad off, or code was "
    "compiled while it was frozen"
)
_ONLY_ZEROS = (
    "only zeros get there: a rounding or another step before the loss passes no other gradient, unless a "
    "policy such as straight_through gives it one"
)

NamedParameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]


class MaskObserver(Protocol):
    """Is told when masks change; one that is among :attr:`Freezer.observers`."""

    def before_masks(self, names: Collection[str]) -> None:
        """Masks of these parameters are about to be set, some perhaps as they were."""

    def after_masks(self, names: Collection[str]) -> None:
        """They are set, and sources have written to the weights what the masks demand."""


class Freezer:
    """Runs freeze policies on a model and its optimizers.

    Masks change in :meth:`begin_step` only, and only when the count of effective steps has moved on: never
    within a window of accumulated batches, never after a skipped step.

    A tensor that policies let train, and that gets no gradient, or only zeros, until it freezes again or
    training ends, or for 100 updates, is named in a warning.

    Args:
        model: A model, or its parameters by name.
        optimizers: One or several :class:`gradpolicy.MaskedOptimizer`.
        policies: The freeze policies by name.
        seed: Seeds the mask sources that have no seed of their own.
        toggle_requires_grad: Turn ``requires_grad`` off for tensors that are frozen as a whole, unless a
            source needs their gradients: the backward pass then skips them. In compiled modules it stays as
            it is, unless masks never change. Not under DistributedDataParallel, which must know its
            parameters beforehand, nor where the training step as a whole is a compiled function.

    Attributes:
        observers: Who is told when masks change; add to it, and take away.
        scales_gradients: Whether :meth:`observe` scales gradients where a source says so.

    Raises:
        PolicyError: If a policy does not freeze, an optimizer takes no masks, a pattern matches nothing,
            no optimizer holds what a policy matches, two policies have the same source, or two policies want
            different optimizer state for one parameter.

    Example:
        >>> import torch, gradpolicy as gp
        >>> from gradpolicy.freezing import Freezer
        >>> model = torch.nn.Linear(2, 2)
        >>> optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters()))
        >>> freezer = Freezer(model, optimizer, {"bias": gp.Freeze(gp.masks.Fixed(), params="bias")}, seed=0)
        >>> for step in range(3):
        ...     freezer.begin_step(step, epoch=0)
        ...     model(torch.ones(1, 2)).sum().backward()
        ...     freezer.observe()
        ...     optimizer.step()
        ...     freezer.finish_step()
        ...     optimizer.zero_grad()
        >>> [(row.name, row.active_share) for row in freezer.report()]
        [('bias', 0.0)]
    """

    def __init__(
        self,
        model: NamedParameters,
        optimizers: MaskingOptimizer | Sequence[MaskingOptimizer],
        policies: Mapping[str, FreezePolicy],
        *,
        seed: int = 0,
        toggle_requires_grad: bool = True,
    ) -> None:
        self.optimizers = list(optimizers) if isinstance(optimizers, Sequence) else [optimizers]
        _check_optimizers(self.optimizers)
        check_named(policies)
        self.toggle_requires_grad = toggle_requires_grad
        self.observers: list[MaskObserver] = []
        self.scales_gradients = True
        self._seed = seed
        self._model = model if isinstance(model, nn.Module) else _named_parameters(model)
        self._requires_grad = RequiresGrad({})
        self._guards: list[RemovableHandle] = []
        self._missing = MissingGradients()
        # Empty at first: an optimizer may bring masks of its own from a checkpoint.
        self._combined: dict[str, Mask] = {}
        # The step whose masks are set; None before the first, and after a state is loaded.
        self._step: int | None = None
        # The step and epoch that sources are asked about.
        self._now = (0, 0)
        # Whether a step would be taken before there are masks for it.
        self._awaits_begin = True
        self._find_parameters()
        self._policies = [self._bind(name, policy) for name, policy in policies.items()]
        _check_sources(self._policies)
        self._look_up()
        self._guard_steps()

    # ---- policies and parameters

    def _find_parameters(self) -> None:
        """Finds the parameters by name, and the optimizers of each by its id: losses may share some."""
        self._named = _named_parameters(self._model)
        self._optimized = self._count_optimized()
        self._optimizers_of: dict[int, list[MaskingOptimizer]] = {}
        for optimizer in self.optimizers:
            for key in parameter_ids(optimizer):
                self._optimizers_of.setdefault(key, []).append(optimizer)

    def _count_optimized(self) -> int:
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _bind(self, name: str, policy: FreezePolicy) -> PolicyMasks:
        """Finds a policy's parameters and sets its source up."""
        if not isinstance(getattr(policy, "mask", None), MaskSource):
            raise PolicyError(f"policy.{name}: must be a freeze policy, got {type(policy).__name__}")
        with under(f"policy.{name}.params"):
            matched = pick(self._named, policy.params)
        with under(f"policy.{name}"):
            parameters = {key: p for key, p in matched.items() if id(p) in self._optimizers_of}
            if not parameters:
                raise PolicyError(f"no optimizer holds what it matches: {', '.join(list(matched)[:5])}")
            policy.mask.setup(parameters, seed=self._seed)
            if policy.mask.learning_rate_scale(0, 0):
                own = [each for p in parameters.values() for each in self._optimizers_of[id(p)]]
                check_proportional(policy.mask, own)
        return PolicyMasks(name, policy, policy.mask, parameters)

    def _look_up(self) -> None:
        """Finds, for the policies as they are bound, what every step asks for."""
        self.parameters = {name: p for each in self._policies for name, p in each.parameters.items()}
        self._policies_of = {
            name: [each for each in self._policies if name in each.parameters] for name in self.parameters
        }
        for name, policies in self._policies_of.items():
            check_same_options(name, {each.name: each.policy for each in policies})
        self._requires_grad.restore()
        self._requires_grad = RequiresGrad(
            once_each(self._named), [parameter_ids(optimizer) for optimizer in self.optimizers]
        )
        self._wanted: set[str] = set()
        self._updates = ScaledUpdates(self.parameters)
        self._keep_on = self._compiled_names()

    def _compiled_names(self) -> set[str]:
        """Parameters whose ``requires_grad`` must not change, since they are in compiled code.

        Each change is a reason to compile anew, and after eight torch gives up. Where masks never change
        there is but one.
        """
        compiled = compiled_parameters(self._model) if isinstance(self._model, nn.Module) else set()
        return {
            name
            for name, parameter in self.parameters.items()
            if id(parameter) in compiled
            and not (FOLLOWS_REQUIRES_GRAD and all(each.never_changes for each in self._policies_of[name]))
        }

    def take_optimizers(self, optimizers: Sequence[MaskingOptimizer]) -> None:
        """Goes on with optimizers that were put in the place of the former ones; masks are to begin anew.

        Raises:
            PolicyError: If a parameter was replaced too, which the masks then would not know.
        """
        self.optimizers = list(optimizers)
        named = _named_parameters(self._model)
        lost = [name for name, parameter in self.parameters.items() if named.get(name) is not parameter]
        if lost:
            raise PolicyError(
                f"{shortened(lost)}: replaced during the training, together with the optimizers; policies "
                "know only the parameters that the model had when it began"
            )
        # As if all had joined just now.
        self._optimized, self._combined, self._step = -1, {}, None

    def _bind_joined(self) -> None:
        """Binds policies anew to parameters that joined an optimizer, as a finetuning schedule adds them.

        Raises:
            PolicyError: If a mask source remembers what it decided without them.
        """
        if self._count_optimized() == self._optimized:
            return
        self._find_parameters()
        for place, each in enumerate(self._policies):
            matched = pick(self._named, each.policy.params)
            joined = [
                key
                for key, p in matched.items()
                if id(p) in self._optimizers_of and key not in each.parameters
            ]
            if joined and each.source.state_dict():
                raise PolicyError(
                    f"policy.{each.name}: {', '.join(joined[:5])} joined the optimizer during training, and "
                    f"{type(each.source).__name__} decides by what it gathered without; give the optimizer "
                    "all parameters from the start, or take these out of params"
                )
            if joined:
                self._policies[place] = self._bind(each.name, each.policy)
        self._look_up()

    # ---- an effective step

    @torch.no_grad()
    def begin_step(self, step: int, epoch: int = 0, phase: str = "fit") -> None:
        """Sets the masks of an effective step; a second call with the same step changes nothing.

        Args:
            step: Effective optimizer steps taken so far.
            epoch: Epochs completed so far.
            phase: The phase that runs.
        """
        if step == self._step:
            return
        self._bind_joined()
        self._awaits_begin = False
        self._step, self._now = step, (step, epoch)
        changes = [(each, each.update(step, epoch, phase)) for each in self._policies]
        changed = set().union(*(names for _, names in changes)) if self._combined else set(self.parameters)
        resetting = [each for each in self._policies if each.in_effect and each.source.resets_state]
        reset = set().union(*(each.parameters for each in resetting))
        concerned = changed | reset
        if concerned:
            for observer in self.observers:
                observer.before_masks(concerned)
            self._empty_state(reset)
            self._set_masks(concerned)
            training = {name for name in self.parameters if self._combined.get(name) is not False}
            self._warn_of_missing(self._missing.follow(training))
        self._apply([each for each, names in changes if each in resetting or (each.in_effect and names)])
        self._toggle(bool(changed))
        if concerned:
            for observer in self.observers:
                observer.after_masks(concerned)

    @torch.no_grad()
    def observe(self, optimizer: MaskingOptimizer | None = None) -> None:
        """Takes the gradients of an effective step: after backward and unscaling, before clipping.

        Sources that ask for gradients get them, unless one of the optimizer's is not finite, for which mixed
        precision skips the step; and gradients are scaled where a source says so. The gradients of frozen
        entries stay, and the update ignores them. Where you clip or log gradients next, call the optimizer's
        ``mask_gradients`` first.

        Args:
            optimizer: The one that is about to step, where there are several; None means all.
        """
        chosen = self.optimizers if optimizer is None else [optimizer]
        mine = self.parameters
        if optimizer is not None and len(self.optimizers) > 1:
            mine = {name: p for name, p in mine.items() if optimizer in self._optimizers_of[id(p)]}
        if self.wanted_gradients() and _finite_gradients(chosen):
            self._show_gradients(mine, optimizer)
        self._warn_of_missing(self._missing.update(mine))
        for name, scale in self.gradient_scales().items() if self.scales_gradients else ():
            if name in mine and (gradient := mine[name].grad) is not None:
                gradient.mul_(scale)
        self._updates.begin(mine, self._scales("learning_rate_scale"))

    def note_gradient(self, name: str, gradient: Tensor) -> None:
        """Takes what a backward pass gives a parameter, where it is masked before :meth:`observe`."""
        self._missing.note(name, gradient)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Is called after an effective step: scales what it changed where a source sets learning rates."""
        self._updates.finish(self.parameters)

    def gradient_scales(self) -> dict[str, float]:
        """What sources want the gradients of parameters multiplied by in this step."""
        return self._scales("gradient_scale")

    def wanted_gradients(self) -> set[str]:
        """The parameters whose whole gradients mask sources want to see in this step."""
        return set().union(*(each.gradient_names(*self._now) for each in self._policies))

    def keep_requires_grad(self) -> None:
        """Turns ``requires_grad`` on again, and off no more."""
        self.toggle_requires_grad = False
        self._requires_grad.restore()

    def restore(self) -> None:
        """Gives every parameter the ``requires_grad`` it was found with. Masks stay with the optimizer."""
        self._requires_grad.restore()
        while self._guards:
            self._guards.pop().remove()
        self._step, self._awaits_begin = None, False
        self._warn_of_missing(self._missing.finish())

    # ---- what a person sees

    @property
    def policies(self) -> list[str]:
        """The names of the policies."""
        return [each.name for each in self._policies]

    def report(self) -> FreezeReport:
        """A row for each policy: what it matched and what trains now (or will in the first step)."""
        rows = (
            FreezeRow(
                name=each.name,
                source=repr(each.source),
                parameters=len(each.parameters),
                entries=sum(parameter.numel() for parameter in each.parameters.values()),
                active=each.active(),
                in_effect=each.in_effect,
                shared_with=self._shared_with(each),
            )
            for each in self._policies
        )
        return FreezeReport(tuple(rows))

    def frozen_tensors(self) -> dict[str, set[str]]:
        """Return the parameters that each policy freezes as a whole, at its first step or later."""
        return {each.name: each.frozen_tensors() for each in self._policies}

    def parameters_of(self, policy: str) -> dict[str, Tensor]:
        """The parameters that a policy matches, by name.

        Raises:
            PolicyError: If there is no such policy.
        """
        for each in self._policies:
            if each.name == policy:
                return each.parameters
        raise PolicyError(f"no freeze policy {shown(policy)}; {nearest(policy, self.policies)}")

    def mask_of(self, name: str) -> Mask:
        """The mask in force on a parameter: the intersection of all policies that hold.

        Raises:
            PolicyError: If no freeze policy matches the parameter.
        """
        if name not in self.parameters:
            raise PolicyError(f"no freeze policy matches {shown(name)}; {nearest(name, self.parameters)}")
        return self._combined.get(name, True)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """What the sources remember, and masks in force that they could not give again.

        The optimizer's own state_dict holds the masks as they are combined, and the ages.
        """
        masks = {each.name: each.mask_state() for each in self._policies}
        return {
            "sources": {each.name: each.source.state_dict() for each in self._policies},
            "masks": {name: state for name, state in masks.items() if state is not None},
            "identities": {each.name: each.identity() for each in self._policies},
            "parameters": list(self.parameters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives the sources what they remember.

        A policy that the state does not know starts anew; with a warning, one that has another kind of mask
        source now, or other parameters. What only policies of the saved run froze trains.
        """
        self._bind_joined()
        saved, masks, identities = (state.get(key, {}) for key in ("sources", "masks", "identities"))
        for each in self._policies:
            own = each.identity()
            known = each.name in saved
            if known and identities.get(each.name, own) != own:
                warnings.warn(
                    f"policy.{each.name}: was saved with another kind of mask source or other parameters; "
                    "it starts anew",
                    stacklevel=2,
                )
                known = False
            if known:
                each.source.load_state_dict(saved[each.name])
            each.load_mask_state(masks.get(each.name) if known else None)
        self._release(set(state.get("parameters", ())) - set(self.parameters))
        self._combined = {}
        self._step, self._awaits_begin = None, True

    # ---- the parts

    def _guard_steps(self) -> None:
        """Has the optimizers refuse a step before :meth:`begin_step`, while this object lives."""
        freezer = weakref.ref(self)

        def check(optimizer: Any, *_: Any) -> None:
            own = freezer()
            if own is not None and own._awaits_begin and not optimizer.is_probed:
                raise PolicyError(
                    f"policy.{', policy.'.join(own.policies)}: no masks are set for this optimizer step; "
                    "call begin_step(step) before the forward pass, or use gradpolicy.training, which does"
                )

        for optimizer in self.optimizers:
            if isinstance(optimizer, torch.optim.Optimizer):
                weakref.finalize(self, optimizer.register_step_pre_hook(check).remove)

    def _release(self, names: Collection[str]) -> None:
        """Takes off the masks that an optimizer has from a checkpoint, and no policy gives any more."""
        free = {p: (True, (None, None)) for name, p in self._named.items() if name in names}
        set_masks(self.optimizers, free)

    def _apply(self, changed: Sequence[PolicyMasks]) -> None:
        """Has sources write to the weights what new masks demand."""
        # What one writes, another one on the same parameters may hold at zero.
        concerned = {name for each in changed for name in self._shared_with(each)}
        for each in (*changed, *(e for e in self._policies if e.in_effect and e.name in concerned)):
            each.source.apply()

    def _empty_state(self, names: Collection[str]) -> None:
        """Freezes whole parameters for a moment, which leaves nothing of their optimizer state."""
        for name in names:
            self._combined.pop(name, None)
        frozen = {p: (False, ("zero", None)) for name, p in self.parameters.items() if name in names}
        set_masks(self.optimizers, frozen)

    def _set_masks(self, names: Collection[str]) -> None:
        """Hands the optimizers the intersections of the masks in effect, where those are new."""
        new: dict[Tensor, tuple[Mask, Options]] = {}
        for name, parameter in self.parameters.items():
            if name not in names:
                continue
            policies = self._policies_of[name]
            combined = combine(policies, name, parameter)
            if not same_mask(self._combined.get(name), combined):
                policy = policies[0].policy
                self._combined[name] = combined
                new[parameter] = combined, (policy.frozen_state, policy.bias_correction)
        set_masks(self.optimizers, new)

    def _toggle(self, changed: bool) -> None:
        """Turns ``requires_grad`` off where nothing trains and no source wants the gradient."""
        if not self.toggle_requires_grad:
            return
        wanted = self.wanted_gradients()
        if changed or wanted != self._wanted:
            self._wanted = wanted
            frozen = {name for name, mask in self._combined.items() if mask is False}
            self._requires_grad.turn_off(frozen - wanted - self._keep_on)
            if frozen and not self._guards and isinstance(self._model, nn.Module):
                self._guards = guard_group_norms(self._model)

    def _warn_of_missing(self, names: Collection[str]) -> None:
        """Says which tensors train without a gradient."""
        alike: dict[tuple[str, str], list[str]] = {}
        for name in sorted(names, key=[*self.parameters].index):
            why = _ONLY_ZEROS if name in self._missing.zeros else _NO_GRADIENT
            alike.setdefault((self._policies_of[name][0].name, why), []).append(name)
        for (policy, why), own in alike.items():
            warnings.warn(f"policy.{policy}: lets {shortened(own, most=8)} train, but {why}", stacklevel=3)

    def _show_gradients(self, mine: Mapping[str, Tensor], optimizer: MaskingOptimizer | None) -> None:
        for each in self._policies:
            wanted = each.gradient_names(*self._now)
            # In the order of the parameters, which is the same on all processes.
            gradients = {
                name: parameter.grad.detach()
                for name, parameter in each.parameters.items()
                if name in wanted and name in mine and parameter.grad is not None
            }
            if gradients:
                each.show(gradients, id(optimizer))

    def _scales(self, method: str) -> dict[str, float]:
        """The product of what the policies in effect ask for."""
        scales: dict[str, float] = {}
        for each in self._policies:
            if each.in_effect:
                for name, scale in getattr(each.source, method)(*self._now).items():
                    scales[name] = scales.get(name, 1.0) * scale
        return scales

    def _shared_with(self, policy: PolicyMasks) -> tuple[str, ...]:
        others = {other.name: None for name in policy.parameters for other in self._policies_of[name]}
        return tuple(name for name in others if name != policy.name)


def _named_parameters(model: NamedParameters) -> dict[str, Tensor]:
    """Parameters by plain name; of a model, shared ones under each of their names."""
    if isinstance(model, nn.Module):
        return dict(named_parameters(model))
    pairs = model.items() if isinstance(model, Mapping) else model
    return {plain_name(name): parameter for name, parameter in pairs}


def _finite_gradients(optimizers: Iterable[MaskingOptimizer]) -> bool:
    """Whether all gradients of the optimizers are finite."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return finite_everywhere(parameter.grad for parameter in parameters if parameter.grad is not None)


def _check_optimizers(optimizers: Iterable[object]) -> None:
    for optimizer in optimizers:
        if not hasattr(optimizer, "set_masks"):
            kind = type(optimizer).__name__
            raise PolicyError(f"optimizers: {kind} takes no masks; wrap it: gradpolicy.MaskedOptimizer(...)")


def _check_sources(policies: Sequence[PolicyMasks]) -> None:
    seen: dict[int, str] = {}
    for each in policies:
        own = each.source.source if isinstance(each.source, Adapted) else each.source
        other = seen.setdefault(id(own), each.name)
        if other != each.name:
            raise PolicyError(
                f"policy.{each.name}: has the mask source of policy.{other}; each needs its own"
            )
