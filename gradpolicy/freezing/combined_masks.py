"""The masks of all policies together, as the optimizers get them."""

from collections.abc import Collection, Mapping, Sequence

from torch import Tensor

from gradpolicy.freezing.bindings import Bindings
from gradpolicy.freezing.bound_policy import BoundPolicy
from gradpolicy.freezing.combination import combine
from gradpolicy.tensors.mask import Mask, same_mask


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

    def update(self, names: Collection[str]) -> None:
        """Set those of these masks that have changed, with one call for all of the same options."""
        new: dict[tuple[str, str], dict[Tensor, Mask]] = {}
        for name, parameter in self._bindings.parameters.items():
            if name not in names:
                continue
            policies = self._bindings.policies_of[name]
            in_effect = [(each.policy, each.masks[name]) for each in policies if each.in_effect]
            combined = combine(in_effect, parameter)
            if not same_mask(self.current.get(name), combined):
                self.current[name] = combined
                policy = policies[0].policy
                new.setdefault((policy.frozen_state, policy.bias_correction), {})[parameter] = combined
        for (frozen_state, bias_correction), masks in new.items():
            self._set(masks, frozen_state=frozen_state, bias_correction=bias_correction)

    def apply(self, changed: Sequence[BoundPolicy]) -> None:
        """Let sources modify the weights for new masks."""
        # Another source on the same parameters may have to set modified entries to zero again.
        of = self._bindings.policies_of
        sharing = {
            other.name for each in changed for n in each.parameters for other in of[n] if other is not each
        }
        again = [each for each in self._bindings.policies.values() if each.in_effect and each.name in sharing]
        for each in (*changed, *again):
            each.source.apply()

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

    def _set(self, masks: Mapping[Tensor, Mask], **options: str) -> None:
        for optimizer, optimized in self._bindings.optimized.items():
            own = {p: None if mask is True else mask for p, mask in masks.items() if p in optimized}
            if own:
                optimizer.set_masks(own, **options)
