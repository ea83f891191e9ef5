"""The ``Freezer``, which sets masks and settings in the optimizers at each step."""

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shortened, under, warn_user
from gradpolicy.freezing.bound_policy import BoundPolicy, combine, frozen_together
from gradpolicy.freezing.diagnostics import MissingGradients
from gradpolicy.freezing.requires_grad import RequiresGrad, is_turned_off
from gradpolicy.freezing.row_gradients import follow_shards, release_rows, set_rows, set_whole
from gradpolicy.freezing.still import StillModules
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.optim.own_settings import check_settings
from gradpolicy.policies import Freeze, Train
from gradpolicy.rates import Rates, Settings, at, combined
from gradpolicy.tensors.mask import Mask, active_entries, active_share, as_tensor, same_mask
from gradpolicy.tensors.row_gradient import ActiveRows
from gradpolicy.tensors.sharding import finite_everywhere, is_sharded
from gradpolicy.what_trains import Layers, what_trains
from gradpolicy.when import When
from gradpolicy.where import named_parameters, pick


class MaskObserver(Protocol):
    """An object in :attr:`Freezer.observers`, which is called when masks change."""

    def before_masks(self, names: Collection[str]) -> None:
        """Handle parameters whose masks are about to be set, possibly to the same values."""

    def after_masks(self, names: Collection[str]) -> None:
        """Handle parameters whose masks are set, after sources have modified the weights."""


class Freezer:
    """Applies the policies that act in the optimizer: freeze policies and rates.

    For each effective step a training loop calls :meth:`begin_step` before the first forward pass, and
    :meth:`observe` between the backward pass and clipping. Masks and settings change only in
    :meth:`begin_step`, and only if the number of effective steps has increased, so not while gradients are
    accumulated nor after a skipped step.

    A warning names an active tensor that gets no gradient, or only zeros, until it freezes or training ends,
    or for 100 updates.

    Args:
        model: The model.
        optimizers: The optimizers of its parameters.
        policies: The freeze policies by name.
        rates: The policies that set learning rates and other settings of single parameters, by name.
        seed: The seed of mask sources without their own seed.
        toggle_requires_grad: Disable ``requires_grad`` of tensors that are frozen as a whole, unless a source
            needs their gradients, so that the backward pass skips them. In compiled modules each set of them
            is compiled once. Use False under DistributedDataParallel, whose set of parameters is fixed, and
            if the whole training step is a compiled function.

    Attributes:
        parameters: The parameters that policies match, by name.
        observers: Objects that are called when masks change.
        dropped: Parameters whose gradients are computed in this step, but dropped like those of steps in
            which ``requires_grad`` is disabled.

    Raises:
        PolicyError: If a pattern matches nothing, no optimizer has the matched parameters, two policies have
            the same source, or two policies require different optimizer state for one parameter.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Sequence[MaskedOptimizer],
        policies: Mapping[str, Freeze],
        *,
        rates: Mapping[str, Rates] | None = None,
        seed: int = 0,
        toggle_requires_grad: bool = True,
    ) -> None:
        self.optimizers = list(optimizers)
        self.toggle_requires_grad = toggle_requires_grad
        self.observers: list[MaskObserver] = []
        self._seed, self._model = seed, model
        self._requires_grad = RequiresGrad(model)
        self.dropped: set[Tensor] = set()
        # FSDP2's first pass takes the dtypes of a block from its parameters that require a gradient.
        self._computes_all = any(map(is_sharded, model.parameters()))
        self._shard_hooks = follow_shards(model)
        self._missing = MissingGradients()
        self._still = StillModules(model)
        # Initially empty, since an optimizer may have masks from a checkpoint.
        self._combined: dict[str, Mask] = {}
        # The step whose masks are set; None before the first step and after loading a state.
        self._step: int | None = None
        # The current step and epoch.
        self._now = (0, 0)
        self._settings: Mapping[str, Settings] = {}
        self._find_parameters()
        _check_sources(policies)
        self._policies = {name: self._bind(name, policy) for name, policy in policies.items()}
        self.rates = dict(rates or {})
        self._index()

    # ---- policies and parameters

    def _find_parameters(self) -> None:
        """Find the model's parameters by name, and the parameters of each optimizer."""
        self._named = named_parameters(self._model)
        self._held = {
            each: {parameter for group in each.param_groups for parameter in group["params"]}
            for each in self.optimizers
        }
        self._optimized = self._count_optimized()

    def _count_optimized(self) -> int:
        return sum(len(group["params"]) for optimizer in self.optimizers for group in optimizer.param_groups)

    def _holders(self, parameter: Tensor) -> list[MaskedOptimizer]:
        return [optimizer for optimizer, held in self._held.items() if parameter in held]

    def _bind(self, name: str, policy: Freeze) -> BoundPolicy:
        """Find a policy's parameters, and set up its source."""
        with under(f"policy.{name}.params"):
            named = pick(self._named, policy.params)
        with under(f"policy.{name}"):
            matched = self._optimized_of(named)
            parameters = self._optimized_of(pick(self._named, policy.restricts))
            policy.mask.model = self._model
            policy.mask.setup(matched, seed=self._seed)
            holders = {each for p in parameters.values() for each in self._holders(p)}
            known = {key for each in holders for group in each.param_groups for key in group}
            check_settings(policy.mask.setting_names, known)
        return BoundPolicy(name, policy, parameters)

    def _optimized_of(self, matched: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the parameters that an optimizer holds."""
        parameters = {key: p for key, p in matched.items() if self._holders(p)}
        if not parameters:
            raise PolicyError(f"no optimizer holds what it matches: {shortened(list(matched), most=5)}")
        return parameters

    def _index(self) -> None:
        """Update the attributes that depend on the bound policies."""
        bound = self._policies.values()
        self.parameters: dict[str, Tensor] = {
            name: p for each in bound for name, p in each.parameters.items()
        }
        self._policies_of = {
            # Those that match it come first, since their options apply.
            name: sorted(
                (each for each in bound if name in each.parameters), key=lambda e: not e.matches(name)
            )
            for name in self.parameters
        }
        for name, policies in self._policies_of.items():
            matching = [each for each in policies if each.matches(name)] or policies
            check_same_options(name, {each.name: each.policy for each in matching})
        self._own = {
            optimizer: {name: p for name, p in self.parameters.items() if p in held}
            for optimizer, held in self._held.items()
        }
        changing = {
            name
            for name, policies in self._policies_of.items()
            if not all(masks_never_change(each.policy) for each in policies)
        }
        self._requires_grad.restore()
        self._requires_grad = RequiresGrad(self._model, self._held.values(), changing=changing)
        self._wanted: set[str] = set()
        # The settings of sources, and the counts at which rates were evaluated, for the current settings.
        self._settings_at: tuple[dict[str, Settings], dict[str, int]] | None = None
        self._settings_of = {name: self._bind_rates(name, policy) for name, policy in self.rates.items()}

    def _bind_rates(self, name: str, policy: Rates) -> dict[str, Settings]:
        """Return the settings of each parameter that a policy matches."""
        with under(f"policy.{name}.params"):
            matched = policy.settings_of(self._named)
            self._optimized_of({key: self._named[key] for key in matched})
        return matched

    def _bind_joined(self) -> None:
        """Bind policies to parameters that were added to an optimizer, as by a finetuning schedule.

        Raises:
            PolicyError: If a mask source has gathered gradients, or made a decision, without them.
        """
        if self._count_optimized() == self._optimized:
            return
        self._find_parameters()
        for name, each in self._policies.items():
            matched = pick(self._named, each.policy.restricts)
            joined = [key for key, p in matched.items() if key not in each.parameters and self._holders(p)]
            if joined and each.source.state_dict():
                raise PolicyError(
                    f"policy.{name}: {shortened(joined, most=5)} joined the optimizer during training, and "
                    f"{type(each.source).__name__} decides by what it gathered without; give the optimizer "
                    "all parameters from the start, or take these out of params"
                )
            if joined:
                self._policies[name] = self._bind(name, each.policy)
        self._index()

    # ---- an effective step

    @torch.no_grad()
    def begin_step(self, step: int, epoch: int = 0, phase: str = "fit") -> None:
        """Set the masks of an effective step. Another call with the same step has no effect.

        Args:
            step: The number of effective optimizer steps so far.
            epoch: The number of completed epochs.
            phase: The current phase.
        """
        if step == self._step:
            return
        self._bind_joined()
        asked = [each.source for each in self._policies.values() if each.asks(step, epoch, phase)]
        with self._whole(values=any(source.reads_weights for source in asked)):
            self._begin_step(step, epoch, phase)

    def _begin_step(self, step: int, epoch: int, phase: str) -> None:
        self._step, self._now = step, (step, epoch)
        bound = self._policies.values()
        changes = {each.name: each.update(step, epoch, phase) for each in bound}
        changed = set().union(*changes.values()) if self._combined else set(self.parameters)
        for one in bound:
            one.source.gathers = bool(one.gradient_names(step, epoch))
        if changed:
            for observer in self.observers:
                observer.before_masks(changed)
            self._update_masks(changed)
            training = {name for name in self.parameters if self._combined.get(name) is not False}
            self._warn_of_missing(self._missing.follow(training))
            self._keep_still()
        self._apply([each for each in bound if each.in_effect and changes[each.name]])
        self._toggle(bool(changed))
        self._set_settings(phase)
        for observer in self.observers if changed else ():
            observer.after_masks(changed)

    def _whole(self, *, values: bool = False) -> ExitStack:
        """Return a block in which all parameters have their whole shape, and perhaps their values."""
        block = ExitStack()
        for optimizer in self.optimizers:
            block.enter_context(optimizer.whole_parameters(values=values))
        return block

    @torch.no_grad()
    def observe(self, optimizer: MaskedOptimizer) -> None:
        """Process the unscaled and unclipped gradients of an optimizer before its step.

        Sources that need gradients get them, unless a gradient of the optimizer is not finite, in which case
        mixed precision skips the step. Gradients of frozen entries are kept; the update ignores them. Call
        the optimizer's ``mask_gradients`` before you clip or log gradients.
        """
        own = self._own[optimizer]
        for parameter in self.dropped:
            parameter.grad = None
        self._computes_all = False
        if self.wanted_gradients() and _has_finite_gradients(optimizer):
            self._show_gradients(optimizer)
        self._warn_of_missing(self._missing.update(own))

    def note_gradient(self, name: str, gradient: Tensor | None) -> None:
        """Note that a gradient was computed, for callers that mask it before :meth:`observe`.

        Args:
            name: The parameter's name.
            gradient: The gradient; None if a function that uses the parameter has returned none for it.
        """
        if gradient is not None:
            self._missing.note(name, gradient)

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Pass the metrics of a validation to the sources of the policies in effect."""
        for name, each in self._policies.items():
            if each.in_effect:
                with under(f"policy.{name}"):
                    each.source.report(metrics)

    def is_finished(self, step: int, epoch: int) -> bool:
        """Return True if a source ends the training after this number of updates and epochs."""
        return any(
            each.in_effect and each.source.is_finished(step, epoch) for each in self._policies.values()
        )

    def finish(self) -> None:
        """Let sources modify the weights at the end of the training."""
        for each in self._policies.values():
            if each.in_effect:
                each.source.finish()

    def wanted_gradients(self) -> set[str]:
        """Return the names of parameters whose whole gradients mask sources need in the current step."""
        return set().union(*(each.gradient_names(*self._now) for each in self._policies.values()))

    def set_anew(self) -> None:
        """Set all masks again at the next step."""
        self._combined, self._step = {}, None

    def keep_requires_grad(self) -> None:
        """Keep ``requires_grad`` enabled, and compute whole gradients of all parameters."""
        self.toggle_requires_grad = False
        self.dropped = set()
        self._requires_grad.restore()
        for parameter in self.parameters.values():
            set_whole(parameter)

    def restore(self) -> None:
        """Restore ``requires_grad`` and the settings of all parameters. Masks do not change."""
        self._requires_grad.restore()
        for parameter in self.parameters.values():
            release_rows(parameter)
        self._still.release()
        while self._shard_hooks:
            self._shard_hooks.pop().remove()
        self._step = None
        if self._settings_at is not None:
            self._settings_at = None
            self._give_settings({})
        for each in self._policies.values():
            each.source.release()
            each.source.model = None
        self._warn_of_missing(self._missing.finish())

    # ---- for reports and other callers

    @property
    def policies(self) -> list[str]:
        """The names of the freeze policies."""
        return list(self._policies)

    @property
    def all_policies(self) -> set[str]:
        """The names of all policies."""
        return {*self._policies, *self.rates}

    @property
    def held(self) -> dict[str, Tensor]:
        """The parameters that match any policy, by name."""
        rated = {name: self._named[name] for own in self._settings_of.values() for name in own}
        return {**rated, **self.parameters}

    def frozen_tensors(self) -> dict[str, set[str]]:
        """Return the names of parameters that each policy freezes as a whole, now or later."""
        with self._whole():
            frozen = {name: each.frozen_tensors() for name, each in self._policies.items()}
        return frozen_together(frozen, {name: each.policy for name, each in self._policies.items()})

    def active_share(self, policy: str) -> float:
        """Return the share of the entries of a policy's parameters that train."""
        with self._whole():
            own = self.parameters_of(policy)
            active = sum(active_entries(self.mask_of(name), p.shape, p.device) for name, p in own.items())
            return active / max(sum(p.numel() for p in own.values()), 1)

    def what_trains(self, trainable: Collection[str]) -> Layers:
        """Return what trains in the current step, layer by layer.

        Args:
            trainable: The names of the parameters that may train: all others never do.
        """
        policies = self._policies.values()
        with self._whole():
            return what_trains(
                self._named,
                {name: active_share(self.mask_of(name)) for name in self._named if name in trainable},
                factors={name: own["lr"] for name, own in self._settings.items() if "lr" in own},
                still=self._evaluated(),
                matched=set().union(*(each.source.parameters for each in policies)),
                trains_only_matched=any(
                    each.in_effect and isinstance(each.policy, Train) for each in policies
                ),
            )

    @property
    def may_change(self) -> bool:
        """True if masks may change after the first step."""
        return not all(masks_never_change(each.policy) for each in self._policies.values())

    def parameters_of(self, policy: str) -> dict[str, Tensor]:
        """Return the parameters that match a policy, by name."""
        return self._policies[policy].parameters

    def mask_of(self, name: str) -> Mask:
        """Return the current mask of a parameter: the intersection of the masks of all policies in effect."""
        return self._combined.get(name, True)

    # ---- checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the sources, and current masks that they cannot compute again.

        The combined masks and the ages are in the optimizer's own state_dict.
        """
        masks = {name: each.mask_state() for name, each in self._policies.items()}
        return {
            "sources": {name: each.source.state_dict() for name, each in self._policies.items()},
            "masks": {name: state for name, state in masks.items() if state is not None},
            "identities": {name: each.identity() for name, each in self._policies.items()},
            "parameters": list(self.parameters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        A policy that is not in the state starts from its initial state. So does one whose parameters or class
        of mask source have changed, with a warning. Parameters of saved policies that no longer exist become
        active.
        """
        self._bind_joined()
        saved, masks, identities = (state.get(key, {}) for key in ("sources", "masks", "identities"))
        for name, each in self._policies.items():
            own = each.identity()
            known = name in saved
            if known and identities.get(name, own) != own:
                warn_user(
                    f"policy.{name}: was saved with another kind of mask source or other parameters; "
                    "it starts anew"
                )
                known = False
            if known:
                each.source.load_state_dict(saved[name])
            with self._whole():
                each.load_mask_state(masks.get(name) if known else None)
        released = set(state.get("parameters", ())) - set(self.parameters)
        self._set({p: True for name, p in self._named.items() if name in released})
        self.set_anew()

    # ---- the parts of a step

    def _set(self, masks: Mapping[Tensor, Mask], **options: str) -> None:
        """Set masks in the optimizers of the parameters."""
        for optimizer, held in self._held.items():
            own = {p: None if mask is True else mask for p, mask in masks.items() if p in held}
            if own:
                optimizer.set_masks(own, **options)

    def _set_settings(self, phase: str) -> None:
        """Set the settings of parameters in the current step, if they have changed."""
        step, epoch = self._now
        settings: dict[str, Settings] = {}
        for each in self._policies.values():
            for name, own in each.source.settings(step, epoch).items() if each.in_effect else ():
                settings[name] = combined(settings.get(name, {}), own)
        active = {
            name: policy.when.count(step, epoch) if policy.varies else 0
            for name, policy in self.rates.items()
            if policy.when.active(phase=phase, step=step, epoch=epoch)
        }
        if self._settings_at == (settings, active):
            return
        self._settings_at = dict(settings), active
        for name, count in active.items():
            for key, own in self._settings_of[name].items():
                settings[key] = combined(settings.get(key, {}), at(own, count))
        self._give_settings(settings)

    def _give_settings(self, settings: Mapping[str, Settings]) -> None:
        self._settings = settings
        for optimizer in self.optimizers:
            optimizer.set_settings({self._named[name]: own for name, own in settings.items()})

    def _intersection(self, name: str) -> Mask:
        """Return the mask of a parameter under those policies that are in effect."""
        active = [(each.policy, each.masks[name]) for each in self._policies_of[name] if each.in_effect]
        return combine(active, self._named[name])

    def _update_masks(self, names: Collection[str]) -> None:
        """Set the intersections of masks that have changed, with one call for all of the same options."""
        new: dict[tuple[str, str], dict[Tensor, Mask]] = {}
        for name, parameter in self.parameters.items():
            if name not in names:
                continue
            combined = self._intersection(name)
            if not same_mask(self._combined.get(name), combined):
                self._combined[name] = combined
                policy = self._policies_of[name][0].policy
                new.setdefault((policy.frozen_state, policy.bias_correction), {})[parameter] = combined
        for (frozen_state, bias_correction), masks in new.items():
            self._set(masks, frozen_state=frozen_state, bias_correction=bias_correction)

    def _apply(self, changed: Sequence[BoundPolicy]) -> None:
        """Let sources modify the weights for new masks."""
        # Another source on the same parameters may have to set modified entries to zero again.
        pairs = ((each, other) for each in changed for n in each.parameters for other in self._policies_of[n])
        sharing = {other.name for each, other in pairs if other is not each}
        again = [each for name, each in self._policies.items() if each.in_effect and name in sharing]
        for each in (*changed, *again):
            each.source.apply()

    def _toggle(self, changed: bool) -> None:
        """Disable ``requires_grad`` of frozen tensors whose gradient no source needs."""
        wanted = self.wanted_gradients()
        if changed or wanted != self._wanted or self.dropped:
            self._wanted = wanted
            self._compute_rows(wanted)
            if not self.toggle_requires_grad:
                return
            idle = {name for name, mask in self._combined.items() if mask is False} - wanted
            self.dropped = {self.parameters[name] for name in idle} if self._computes_all else set()
            if not self._computes_all:
                self._requires_grad.turn_off(idle)

    def _keep_still(self) -> None:
        """Put frozen modules in evaluation mode, as the policies specify."""
        held = (p for own in self._held.values() for p in own if p.requires_grad or is_turned_off(p))
        evaluated = {self.parameters[name] for name in self._evaluated()}
        self._still.keep(evaluated, {*held, *self.parameters.values()})

    def _evaluated(self) -> set[str]:
        """Return the parameters that policies with ``buffers="eval"`` freeze in the current step."""
        return {
            name
            for each in self._policies.values()
            if each.in_effect and each.policy.buffers == "eval"
            for name, mask in each.masks.items()
            if mask is False and self._combined[name] is False
        }

    def _compute_rows(self, wanted: set[str]) -> None:
        """Compute only the gradients of active rows for masks of rows, unless a source needs the rest."""
        for name, parameter in self.parameters.items():
            holders, mask = self._holders(parameter), self._combined.get(name, True)
            rows = None
            if name in wanted or isinstance(mask, bool):
                pass
            elif is_sharded(parameter):
                rows = ActiveRows.of_mask(as_tensor(mask, parameter.shape, parameter.device))
            elif self.toggle_requires_grad and len(holders) == 1:
                rows = holders[0].active_rows(parameter)
            if rows is None:
                set_whole(parameter)
            else:
                set_rows(parameter, rows)

    def _warn_of_missing(self, names: Collection[str]) -> None:
        """Warn of active tensors without a gradient."""
        if names:
            policy_of = {name: policies[0].name for name, policies in self._policies_of.items()}
            for line in self._missing.lines(names, policy_of):
                warn_user(line)

    def _show_gradients(self, optimizer: MaskedOptimizer) -> None:
        held = self._held[optimizer]
        for each in self._policies.values():
            wanted = each.gradient_names(*self._now)
            # In the order of the parameters, which is the same on all processes.
            gradients = {
                name: parameter.grad.detach()
                for name, parameter in each.parameters.items()
                if name in wanted and parameter in held and parameter.grad is not None
            }
            if gradients:
                each.show(gradients, id(optimizer))


def check_same_options(name: str, policies: Mapping[str, Freeze]) -> None:
    """Check that the policies on a parameter require the same optimizer state.

    Raises:
        PolicyError: If they do not.
    """
    (first, one), *rest = policies.items()
    for other, another in rest:
        for key in ("frozen_state", "bias_correction"):
            here, there = getattr(one, key), getattr(another, key)
            if here != there:
                raise PolicyError(
                    f"{name!r}: policy.{first} wants {key}={here!r}, policy.{other} {key}={there!r};"
                    f" policies on one parameter must agree: give both the same {key}, or different params"
                )


def masks_never_change(policy: Freeze) -> bool:
    """Return True if the masks never change after the first step."""
    times = policy.mask.timetable
    chosen_at_once = times.every is None and not times.start
    return chosen_at_once and not policy.mask.needs_gradients and policy.when == When()


def _check_sources(policies: Mapping[str, Freeze]) -> None:
    """Check that no two policies share a mask source.

    Raises:
        PolicyError: If they do.
    """
    first: dict[int, str] = {}
    for name, policy in policies.items():
        other = first.setdefault(id(policy.mask), name)
        if other != name:
            raise PolicyError(f"policy.{name}: has the mask source of policy.{other}; each needs its own")


def _has_finite_gradients(optimizer: torch.optim.Optimizer) -> bool:
    gradients = (p.grad for group in optimizer.param_groups for p in group["params"])
    return finite_everywhere(gradient for gradient in gradients if gradient is not None)
