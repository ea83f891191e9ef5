"""The engine of freeze policies: asks the sources, combines their masks, hands them to the optimizer.

It knows neither Lightning nor the optimizer's arithmetic. A training loop calls, for each effective step,
``begin_step`` before the first forward pass, ``observe`` between backward pass and clipping, and
``finish_step`` after the update.
"""

import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, check_named, nearest, shortened, shown
from gradpolicy.freezing.compiled import FOLLOWS_REQUIRES_GRAD, compiled_parameters
from gradpolicy.freezing.missing_gradients import GradientWatch
from gradpolicy.freezing.policy_masks import BoundPolicy, FreezePolicy, FreezeRow, check_agreement
from gradpolicy.freezing.requires_grad import GradientSwitch
from gradpolicy.freezing.scaled_updates import ScaledUpdates, check_rates
from gradpolicy.masks.base import MaskSource
from gradpolicy.masks.function import Adapted
from gradpolicy.tensors.mask import Mask, intersect, same_mask
from gradpolicy.tensors.sharding import finite_everywhere
from gradpolicy.where import named_parameters, once_each, pick, plain_name

NamedParameters = nn.Module | Mapping[str, Tensor] | Iterable[tuple[str, Tensor]]
Options = tuple[str | None, str | None]
"""``frozen_state`` and ``bias_correction``."""


class MaskingOptimizer(Protocol):
    """What the engine needs of an optimizer; :class:`gradpolicy.MaskedOptimizer` has it."""

    param_groups: list[dict[str, Any]]

    def set_masks(
        self, masks: Mapping[Tensor, Any], *, frozen_state: str | None, bias_correction: str | None
    ) -> None:
        """Sets the masks of parameters; None lets every entry train."""

    def mask_gradients(self) -> None:
        """Removes the gradients of frozen entries."""


class Freezer:
    """Runs freeze policies on a model and its optimizers.

    Masks change in :meth:`begin_step` only, and only when the count of effective steps has moved on: never
    within a window of accumulated batches, never after a skipped step.

    A tensor that policies let train, and that gets no gradient until it freezes again or training ends, or
    for 100 updates, is named in a warning.

    Args:
        model: A model, or its parameters by name.
        optimizers: One or several :class:`gradpolicy.MaskedOptimizer`.
        policies: The freeze policies by name.
        seed: Seeds the mask sources that have no seed of their own.
        toggle_requires_grad: Turn ``requires_grad`` off for tensors that are frozen as a whole, unless a
            source needs their gradients: the backward pass then skips them. In compiled modules it stays as
            it is, unless masks never change. Not under DistributedDataParallel, which must know its
            parameters beforehand, nor where the training step as a whole is a compiled function.

    Raises:
        PolicyError: If a policy does not freeze, an optimizer takes no masks, a pattern matches nothing,
            no optimizer holds what a policy matches, a source serves two policies, or two policies want
            different optimizer state for one parameter.

    Example:
        >>> import torch, gradpolicy as gp
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
        self._model = model if isinstance(model, nn.Module) else _named_parameters(model)
        self._named = _named_parameters(self._model)
        self._owners, self._held = self._find_owners(), self._count_held()
        self._bound = [self._bind(name, policy, seed) for name, policy in policies.items()]
        _check_sources(self._bound)
        self._seed = seed
        # Empty at first: an optimizer may bring masks of its own from a checkpoint.
        self._combined: dict[str, Mask] = {}
        self._switch = GradientSwitch({})
        self._watch = GradientWatch()
        self._wanting: tuple[bool, ...] = ()
        self._step: int | None = None
        self._epoch = 0
        # Whether gradients were shown in this step, and whether it was said that they were not.
        self._observed = self._has_told = False
        self._look_up()

    def _bind(self, name: str, policy: FreezePolicy, seed: int) -> BoundPolicy:
        """Finds a policy's parameters and sets its source up."""
        if not isinstance(getattr(policy, "mask", None), MaskSource):
            raise PolicyError(f"policy.{name}: must be a freeze policy, got {type(policy).__name__}")
        try:
            matched = pick(self._named, policy.params)
            parameters = {key: p for key, p in matched.items() if id(p) in self._owners}
            if not parameters:
                raise PolicyError(f"no optimizer holds what it matches: {', '.join(list(matched)[:5])}")
            policy.mask.setup(parameters, seed=seed)
            if policy.mask.learning_rate_scale(0, 0):
                check_rates(policy.mask, [each for p in parameters.values() for each in self._owners[id(p)]])
        except PolicyError as error:
            raise PolicyError(f"policy.{name}: {error}") from error
        return BoundPolicy(name, policy, policy.mask, parameters)

    def _find_owners(self) -> dict[int, list[MaskingOptimizer]]:
        """The optimizers of each parameter, by the parameter's id: losses may share what they train."""
        owners: dict[int, list[MaskingOptimizer]] = {}
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    owners.setdefault(id(parameter), []).append(optimizer)
        return owners

    def _count_held(self) -> int:
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _look_up(self) -> None:
        """Finds, for the policies as they are bound, what every step asks for."""
        self.parameters = {name: p for bound in self._bound for name, p in bound.parameters.items()}
        self._policies_of = {
            name: [bound for bound in self._bound if name in bound.parameters] for name in self.parameters
        }
        for name, bounds in self._policies_of.items():
            check_agreement(name, {bound.name: bound.policy for bound in bounds})
        held = [{id(p) for group in each.param_groups for p in group["params"]} for each in self.optimizers]
        self._switch.restore()
        self._switch, self._wanting = GradientSwitch(once_each(self._named), held), ()
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
            and not (FOLLOWS_REQUIRES_GRAD and all(bound.never_changes for bound in self._policies_of[name]))
        }

    def _follow_optimizers(self) -> None:
        """Binds policies anew to parameters that joined an optimizer, as a finetuning schedule adds them.

        Raises:
            PolicyError: If a mask source remembers what it decided without them.
        """
        if self._count_held() == self._held:
            return
        self._named, self._owners = _named_parameters(self._model), self._find_owners()
        for place, bound in enumerate(self._bound):
            matched = pick(self._named, bound.policy.params)
            joined = [
                key for key, p in matched.items() if id(p) in self._owners and key not in bound.parameters
            ]
            if joined and bound.source.state_dict():
                raise PolicyError(
                    f"policy.{bound.name}: {', '.join(joined[:5])} joined the optimizer during training, and "
                    f"{type(bound.source).__name__} decides by what it gathered without; give the optimizer "
                    "all parameters from the start, or take these out of params"
                )
            if joined:
                self._bound[place] = self._bind(bound.name, bound.policy, self._seed)
        self._held = self._count_held()
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
        self._tell_unobserved()
        self._follow_optimizers()
        self._step, self._epoch, self._observed = step, epoch, False
        asked = [(bound, bound.ask(step, epoch, phase)) for bound in self._bound]
        changed = set(self.parameters) if not self._combined else set().union(*(names for _, names in asked))
        renewing = [bound for bound in self._bound if bound.holds and bound.source.renews_state]
        renewed = set().union(*(bound.parameters for bound in renewing))
        if renewed:
            self._empty_state(renewed)
        if changed or renewed:
            self._set_masks(changed | renewed)
            training = {name for name in self.parameters if self._combined.get(name) is not False}
            self._warn_of_missing(self._watch.follow(training))
        self._apply([bound for bound, names in asked if bound.holds and (names or bound.source.renews_state)])
        self._toggle(bool(changed))

    @torch.no_grad()
    def observe(self, optimizer: MaskingOptimizer | None = None) -> None:
        """Takes the gradients of an effective step: after backward and unscaling, before clipping.

        Sources that ask for gradients get the whole ones, unless one of the optimizer's is not finite, for
        which mixed precision skips the step; then those of frozen entries are removed.

        Args:
            optimizer: The one that is about to step, where there are several; None means all.
        """
        self._observed = True
        chosen = self.optimizers if optimizer is None else [optimizer]
        mine = self.parameters
        if optimizer is not None and len(self.optimizers) > 1:
            mine = {name: p for name, p in mine.items() if optimizer in self._owners[id(p)]}
        if self._gradients_wanted() and _finite_gradients(chosen):
            self._show_gradients(mine, optimizer)
        self._warn_of_missing(self._watch.see(mine))
        for each in chosen:
            each.mask_gradients()
        self._scale_gradients(mine)
        self._updates.begin(mine, self._scales("learning_rate_scale"))

    @torch.no_grad()
    def finish_step(self) -> None:
        """Is called after an effective step: scales what it changed where a source sets learning rates."""
        self._tell_unobserved()
        self._updates.finish(self.parameters)

    def restore(self) -> None:
        """Gives every parameter the ``requires_grad`` it was found with. Masks stay with the optimizer."""
        self._switch.restore()
        self._step = None
        self._warn_of_missing(self._watch.finish())

    # ---- what a person sees

    @property
    def policies(self) -> list[str]:
        """The names of the policies."""
        return [bound.name for bound in self._bound]

    def report(self) -> list[FreezeRow]:
        """A row for each policy: what it matched and what trains now (or will in the first step)."""
        return [
            FreezeRow(
                name=bound.name,
                source=repr(bound.source),
                parameters=len(bound.parameters),
                entries=sum(parameter.numel() for parameter in bound.parameters.values()),
                active=bound.active(),
                holds=bound.holds,
                shared_with=self._shared_with(bound),
            )
            for bound in self._bound
        ]

    def parameters_of(self, policy: str) -> dict[str, Tensor]:
        """The parameters that a policy matches, by name.

        Raises:
            PolicyError: If there is no such policy.
        """
        for bound in self._bound:
            if bound.name == policy:
                return bound.parameters
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
        masks = {bound.name: bound.mask_state() for bound in self._bound}
        return {
            "sources": {bound.name: bound.source.state_dict() for bound in self._bound},
            "masks": {name: state for name, state in masks.items() if state is not None},
            "identities": {bound.name: bound.identity() for bound in self._bound},
            "parameters": list(self.parameters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Gives the sources what they remember.

        A policy that the state does not know starts anew; with a warning, one that has another kind of mask
        source now, or other parameters. What only policies of the saved run froze trains.
        """
        self._follow_optimizers()
        saved, masks, identities = (state.get(key, {}) for key in ("sources", "masks", "identities"))
        for bound in self._bound:
            own = bound.identity()
            known = bound.name in saved
            if known and identities.get(bound.name, own) != own:
                warnings.warn(
                    f"policy.{bound.name}: was saved with another kind of mask source or other parameters; "
                    "it starts anew",
                    stacklevel=2,
                )
                known = False
            if known:
                bound.source.load_state_dict(saved[bound.name])
            bound.load_mask_state(masks.get(bound.name) if known else None)
        self._release(set(state.get("parameters", ())) - set(self.parameters))
        self._combined = {}
        self._step = None

    # ---- the parts

    def _release(self, names: Collection[str]) -> None:
        """Takes off the masks that an optimizer has from a checkpoint, and no policy gives any more."""
        for optimizer in self.optimizers:
            held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
            free = {p: None for name, p in self._named.items() if name in names and id(p) in held}
            optimizer.set_masks(free, frozen_state=None, bias_correction=None)

    def _apply(self, changed: Sequence[BoundPolicy]) -> None:
        """Has sources write to the weights what new masks demand."""
        # What one writes, another one on the same parameters may hold at zero.
        concerned = {name for bound in changed for name in self._shared_with(bound)}
        for bound in (*changed, *(each for each in self._bound if each.holds and each.name in concerned)):
            bound.source.apply()

    def _empty_state(self, names: Collection[str]) -> None:
        """Freezes whole parameters for a moment, which leaves nothing of their optimizer state."""
        for name in names:
            self._combined.pop(name, None)
        self._hand_over({name: (False, ("zero", None)) for name in self.parameters if name in names})

    def _set_masks(self, names: Collection[str]) -> None:
        """Hands the optimizers the intersections of the masks that hold, where those are new."""
        new: dict[str, tuple[Mask, Options]] = {}
        for name, parameter in self.parameters.items():
            if name not in names:
                continue
            bounds = self._policies_of[name]
            combined: Mask = True
            for mask in (bound.masks[name] for bound in bounds if bound.holds):
                combined = intersect(combined, mask, parameter.shape, parameter.device)
            if not same_mask(self._combined.get(name), combined):
                policy = bounds[0].policy
                self._combined[name] = combined
                new[name] = combined, (policy.frozen_state, policy.bias_correction)
        self._hand_over(new)

    def _hand_over(self, masks: Mapping[str, tuple[Mask, Options]]) -> None:
        """Gives each optimizer all its masks of the same options at once."""
        for optimizer in self.optimizers:
            alike: dict[Options, dict[Tensor, Any]] = {}
            for name, (mask, options) in masks.items():
                parameter = self.parameters[name]
                if optimizer in self._owners[id(parameter)]:
                    alike.setdefault(options, {})[parameter] = _for_optimizer(mask, parameter)
            for (frozen_state, bias_correction), together in alike.items():
                optimizer.set_masks(together, frozen_state=frozen_state, bias_correction=bias_correction)

    def _toggle(self, changed: bool) -> None:
        """Turns ``requires_grad`` off where nothing trains and nobody wants the gradient."""
        if not self.toggle_requires_grad or self._step is None:
            return
        times = (self._step, self._epoch)
        wanting = tuple(bound.holds and bound.source.wants_gradients(*times) for bound in self._bound)
        if not changed and wanting == self._wanting:
            return
        self._wanting = wanting
        wanted = {
            name
            for bound, wants in zip(self._bound, wanting, strict=True)
            if wants
            for name in bound.source.gradient_names(*times)
        }
        frozen = {name for name, mask in self._combined.items() if mask is False}
        self._switch.turn_off(frozen - wanted - self._keep_on)

    def _warn_of_missing(self, names: Collection[str]) -> None:
        """Says which tensors train without a gradient."""
        by_policy: dict[str, list[str]] = {}
        for name in sorted(names, key=[*self.parameters].index):
            by_policy.setdefault(self._policies_of[name][0].name, []).append(name)
        for policy, own in by_policy.items():
            warnings.warn(
                f"policy.{policy}: lets {shortened(own, most=8)} train, but no gradient gets there: no loss "
                "depends on it, something else turned requires_grad off, or code was compiled while it was "
                "frozen",
                stacklevel=3,
            )

    def _gradients_wanted(self) -> bool:
        times = (self._step or 0, self._epoch)
        return any(bound.holds and bound.source.wants_gradients(*times) for bound in self._bound)

    def _tell_unobserved(self) -> None:
        """Says once, when a step is over, that a source waits for gradients which nobody showed it."""
        if self._step is None or self._observed or self._has_told:
            return
        for bound in self._bound:
            if bound.holds and bound.source.wants_gradients(self._step, self._epoch):
                self._has_told = True
                nothing = "" if bound.active() else ", and until it has seen some nothing trains"
                warnings.warn(
                    f"policy.{bound.name}: {type(bound.source).__name__} decides by gradients, and in step "
                    f"{self._step} it was shown none{nothing}; call freezer.observe() between backward() and "
                    "optimizer.step()",
                    stacklevel=4,
                )

    def _show_gradients(self, mine: Mapping[str, Tensor], optimizer: MaskingOptimizer | None) -> None:
        times = (self._step or 0, self._epoch)
        for bound in self._bound:
            if not bound.holds or not bound.source.wants_gradients(*times):
                continue
            wanted = bound.source.gradient_names(*times)
            gradients = {
                name: parameter.grad.detach()
                for name, parameter in bound.parameters.items()
                if name in wanted and name in mine and parameter.grad is not None
            }
            if gradients:
                bound.show(gradients, id(optimizer))

    def _scale_gradients(self, mine: Mapping[str, Tensor]) -> None:
        for name, scale in self._scales("gradient_scale").items():
            if name in mine and (gradient := mine[name].grad) is not None:
                gradient.mul_(scale)

    def _scales(self, method: str) -> dict[str, float]:
        """The product of what the policies that hold ask for."""
        scales: dict[str, float] = {}
        for bound in self._bound:
            if bound.holds:
                for name, scale in getattr(bound.source, method)(self._step or 0, self._epoch).items():
                    scales[name] = scales.get(name, 1.0) * scale
        return scales

    def _shared_with(self, bound: BoundPolicy) -> tuple[str, ...]:
        others = {other.name: None for name in bound.parameters for other in self._policies_of[name]}
        return tuple(name for name in others if name != bound.name)


def _named_parameters(model: NamedParameters) -> dict[str, Tensor]:
    """Parameters by plain name; of a model, shared ones under each of their names."""
    if isinstance(model, nn.Module):
        return dict(named_parameters(model))
    pairs = model.items() if isinstance(model, Mapping) else model
    return {plain_name(name): parameter for name, parameter in pairs}


def _for_optimizer(mask: Mask, parameter: Tensor) -> Any:
    if isinstance(mask, bool):
        return None if mask else torch.zeros((), dtype=torch.bool, device=parameter.device)
    return mask.to(parameter.device) if isinstance(mask, Tensor) else mask


def _finite_gradients(optimizers: Iterable[MaskingOptimizer]) -> bool:
    """Whether all gradients of the optimizers are finite."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    return finite_everywhere(parameter.grad for parameter in parameters if parameter.grad is not None)


def _check_optimizers(optimizers: Iterable[object]) -> None:
    for optimizer in optimizers:
        if not hasattr(optimizer, "set_masks"):
            kind = type(optimizer).__name__
            raise PolicyError(f"optimizers: {kind} takes no masks; wrap it: gradpolicy.MaskedOptimizer(...)")


def _check_sources(bound: Sequence[BoundPolicy]) -> None:
    seen: dict[int, str] = {}
    for each in bound:
        own = each.source.source if isinstance(each.source, Adapted) else each.source
        other = seen.setdefault(id(own), each.name)
        if other != each.name:
            raise PolicyError(
                f"policy.{each.name}: has the mask source of policy.{other}; each needs its own"
            )
