"""Masks and settings of parameters, as all policies together demand them."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradpolicy.errors import PolicyError, under
from gradpolicy.freezing.bindings import Bindings
from gradpolicy.freezing.bound_policy import BoundPolicy
from gradpolicy.freezing.moving_parts import renormalised
from gradpolicy.policies import Freeze, Train
from gradpolicy.rates import Settings, at, combined
from gradpolicy.tensors.mask import Mask, active_share, intersect, same_mask, unite


class CombinedMasks:
    """Combines the masks of the policies in effect, and sets them in the optimizers.

    Args:
        bindings: The bound policies.

    Attributes:
        current: The current masks by parameter name.
    """

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        # Initially empty, since an optimizer may have masks from a checkpoint.
        self.current: dict[str, Mask] = {}
        self._renormalised = renormalised(bindings.model, bindings.parameters)
        self._check_renormalised()

    def update(self, names: Collection[str]) -> None:
        """Set those of these masks that have changed, with one call for all of the same options."""
        new: dict[tuple[str, str, bool], dict[Tensor, Mask]] = {}
        for name, parameter in self._bindings.parameters.items():
            if name not in names:
                continue
            policies = self._bindings.policies_of[name]
            in_effect = [(each.policy, each.masks[name]) for each in policies if each.in_effect]
            combined = combine(in_effect, parameter)
            if not same_mask(self.current.get(name), combined):
                self.current[name] = combined
                policy, master = policies[0].policy, any(each.policy.master_weights for each in policies)
                options = policy.frozen_state, policy.bias_correction, master
                new.setdefault(options, {})[parameter] = combined
        for (frozen_state, bias_correction, master), masks in new.items():
            self._set(
                masks, frozen_state=frozen_state, bias_correction=bias_correction, master_weights=master
            )
        self._check_renormalised()

    def apply(self, changed: Sequence[BoundPolicy]) -> list[BoundPolicy]:
        """Let sources modify the weights for new masks, and return those that may have."""
        # Another source on the same parameters may have to set modified entries to zero again.
        of = self._bindings.policies_of
        sharing = {
            other.name for each in changed for n in each.parameters for other in of[n] if other is not each
        }
        again = [each for each in self._bindings.policies.values() if each.in_effect and each.name in sharing]
        for each in (*changed, *again):
            each.source.apply()
        return [*changed, *again]

    def release(self, names: Collection[str]) -> None:
        """Let all entries of parameters train that no policy restricts any more."""
        self._set({p: True for name, p in self._bindings.named.items() if name in names})

    def frozen(self) -> set[str]:
        """Return the names of parameters without an entry that trains."""
        return {name for name, mask in self.current.items() if mask is False}

    def evaluated(self) -> set[str]:
        """Return the names of parameters that policies with ``buffers="eval"`` freeze."""
        frozen, policies = self.frozen(), self._bindings.policies.values()
        evaluating = [each for each in policies if each.in_effect and each.policy.buffers == "eval"]
        return frozen & {n for each in evaluating for n, mask in each.masks.items() if mask is False}

    def _check_renormalised(self) -> None:
        """Check that no embedding writes to frozen rows of its table in the forward pass.

        Raises:
            PolicyError: If one does, or will.
        """
        for name, kind in self._renormalised.items():
            own = {each.name: each for each in self._bindings.policies_of[name]}
            policies = {key: each.policy for key, each in own.items()}
            frozen = frozen_together({key: each.frozen_tensors() for key, each in own.items()}, policies)
            known = [(each.policy, each.masks[name]) for each in own.values() if each.masks]
            share = active_share(combine(known, self._bindings.parameters[name]))
            if share < 1.0 or any(name in names for names in frozen.values()):
                raise PolicyError(
                    f"{name}: {kind} rescales rows in each forward pass, frozen or not; expected "
                    "max_norm=None, or policies under which the full table trains"
                )

    def _set(self, masks: Mapping[Tensor, Mask], **options: Any) -> None:
        for optimizer, optimized in self._bindings.optimized.items():
            own = {p: None if mask is True else mask for p, mask in masks.items() if p in optimized}
            if own:
                optimizer.set_masks(own, **options)


class ParameterSettings:
    """Sets what ``Rates`` and mask sources, such as phases, say about single parameters in the optimizers.

    Args:
        bindings: The bound policies.

    Attributes:
        current: The current settings by parameter name.
    """

    def __init__(self, bindings: Bindings) -> None:
        self._bindings = bindings
        self.current: dict[str, Settings] = {}
        # What the current settings were determined from; None if there are none.
        self._from: tuple[Any, ...] | None = None

    def update(self, step: int, epoch: int, phase: str) -> None:
        """Set the settings of an update, if they have changed."""
        in_effect = [each.source for each in self._bindings.policies.values() if each.in_effect]
        of_sources = combined(source.settings(step, epoch) for source in in_effect)
        counts = {
            name: policy.when.count(step, epoch) if policy.varies else 0
            for name, policy in self._bindings.rates.items()
            if policy.when.active(phase=phase, step=step, epoch=epoch)
        }
        now = (of_sources, counts, self._bindings.count_optimized(), self._bindings.settings_of)
        if now == self._from:
            return
        self._from = now
        of_rates = []
        for policy, count in counts.items():
            with under(f"policy.{policy}"):
                own = self._bindings.settings_of[policy].items()
                of_rates.append({name: at(each, count) for name, each in own})
        self._set(combined([of_sources, *of_rates]))

    def restore(self) -> None:
        """Restore the settings of the optimizers' param groups."""
        if self._from is not None:
            self._from = None
            self._set({})

    def _set(self, settings: dict[str, Settings]) -> None:
        self.current, named = settings, self._bindings.named
        for optimizer in self._bindings.optimizers:
            optimizer.set_settings({named[name]: own for name, own in settings.items()})


def combine(masks: Iterable[tuple[Freeze, Mask]], parameter: Tensor) -> Mask:
    """Return the mask of a parameter under several active policies.

    Args:
        masks: The policies, each with its own mask of the parameter. The masks of ``Train`` policies are
            united, and the result is intersected with those of all others.
        parameter: The parameter.
    """
    shape, device = parameter.shape, parameter.device
    combined: Mask = True
    trained: Mask | None = None
    for policy, mask in masks:
        if isinstance(policy, Train):
            trained = mask if trained is None else unite(trained, mask, shape, device)
        else:
            combined = intersect(combined, mask, shape, device)
    return combined if trained is None else intersect(combined, trained, shape, device)


def frozen_together(frozen: Mapping[str, set[str]], policies: Mapping[str, Freeze]) -> dict[str, set[str]]:
    """Return what each policy freezes by name: ``Train`` policies freeze only what none of them trains."""
    trains = [frozen[name] for name, policy in policies.items() if isinstance(policy, Train)]
    return {
        name: names.intersection(*trains) if isinstance(policies[name], Train) else names
        for name, names in frozen.items()
    }
