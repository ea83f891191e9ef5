"""Masks and settings of parameters, as all policies together demand them."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import Tensor

from gradpolicy.errors import PolicyError, under
from gradpolicy.freezing.bindings import Bindings
from gradpolicy.freezing.bound_policy import BoundPolicy, combine
from gradpolicy.freezing.moving_parts import renormalised
from gradpolicy.rates import Settings, at, combined
from gradpolicy.tensors.mask import Mask, active_share, same_mask


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

    def update(self, names: Collection[str]) -> None:
        """Set those of these masks that have changed, with one call for all of the same options."""
        new: dict[tuple[str, str, bool], dict[Tensor, Mask]] = {}
        for name, parameter in self._bindings.parameters.items():
            if name not in names:
                continue
            policies = self._bindings.policies_of[name]
            combined = combine((each for each in policies if each.in_effect), name, parameter)
            if not same_mask(self.current.get(name), combined):
                self.current[name] = combined
                policy, master = policies[0].policy, any(each.policy.master_weights for each in policies)
                options = policy.frozen_state, policy.bias_correction, master
                new.setdefault(options, {})[parameter] = combined
        self._check_renormalised()
        for (frozen_state, bias_correction, master), masks in new.items():
            self._set(
                masks, frozen_state=frozen_state, bias_correction=bias_correction, master_weights=master
            )

    def apply(self, changed: Sequence[BoundPolicy]) -> list[BoundPolicy]:
        """Let sources modify the weights for new masks, and return those that may have."""
        # Another source on the same parameters may have to set modified entries to zero again.
        of = self._bindings.policies_of
        sharing = {
            other for each in changed for name in each.parameters for other in of[name] if other is not each
        }
        again = [each for each in self._bindings.in_effect if each in sharing]
        for each in (*changed, *again):
            each.source.apply()
        return [*changed, *again]

    def release(self, names: Collection[str]) -> None:
        """Let all entries of parameters train that no policy restricts any more."""
        self._set({p: True for name, p in self._bindings.named.items() if name in names})

    def _check_renormalised(self) -> None:
        """Check that no embedding writes to frozen rows of its table in the forward pass.

        Raises:
            PolicyError: If one does, or will.
        """
        later = set().union(*self._bindings.frozen_tensors().values()) if self._renormalised else set()
        for name, kind in self._renormalised.items():
            if name in later or active_share(self.current[name]) < 1.0:
                raise PolicyError(
                    f"{name}: {kind} rescales rows in each forward pass, frozen or not; expected "
                    "max_norm=None, or policies under which the full table trains"
                )

    def _set(self, masks: Mapping[Tensor, Mask], **options: Any) -> None:
        for optimizer, optimized in self._bindings.optimized.items():
            of_optimizer = {p: None if mask is True else mask for p, mask in masks.items() if p in optimized}
            if of_optimizer:
                optimizer.set_masks(of_optimizer, **options)


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
        of_sources = combined(each.source.settings(step, epoch) for each in self._bindings.in_effect)
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
                settings = self._bindings.settings_of[policy].items()
                of_rates.append({name: at(each, count) for name, each in settings})
        self._set(combined([of_sources, *of_rates]))

    def restore(self) -> None:
        """Restore the settings of the optimizers' param groups."""
        if self._from is not None:
            self._from = None
            self._set({})

    def _set(self, settings: dict[str, Settings]) -> None:
        self.current, named = settings, self._bindings.named
        for optimizer in self._bindings.optimized:
            optimizer.set_settings({named[name]: each for name, each in settings.items()})
