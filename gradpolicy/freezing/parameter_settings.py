"""Learning rates and other settings of single parameters in an update."""

from collections.abc import Mapping, Sequence

from gradpolicy.freezing.bindings import Bindings
from gradpolicy.optim import MaskedOptimizer
from gradpolicy.rates import Rates, Settings, at, combined


class ParameterSettings:
    """Sets what ``Rates`` and mask sources, such as phases, say about single parameters in the optimizers.

    Args:
        bindings: The bound policies.
        optimizers: The optimizers.
        rates: The policies that set learning rates and other settings, by name.

    Attributes:
        current: The current settings by parameter name.
    """

    def __init__(
        self, bindings: Bindings, optimizers: Sequence[MaskedOptimizer], rates: Mapping[str, Rates]
    ) -> None:
        self._bindings, self._optimizers, self._rates = bindings, optimizers, rates
        self.current: dict[str, Settings] = {}
        # The settings of sources, and the counts at which rates were evaluated, for the current settings.
        self._of_sources: dict[str, Settings] | None = None
        self._counts: dict[str, int] = {}

    def update(self, step: int, epoch: int, phase: str) -> None:
        """Set the settings of an update, if they have changed."""
        in_effect = [each.source for each in self._bindings.policies.values() if each.in_effect]
        of_sources = combined(source.settings(step, epoch) for source in in_effect)
        counts = {
            name: policy.when.count(step, epoch) if policy.varies else 0
            for name, policy in self._rates.items()
            if policy.when.active(phase=phase, step=step, epoch=epoch)
        }
        if (self._of_sources, self._counts) == (of_sources, counts):
            return
        self._of_sources, self._counts = of_sources, counts
        of_rates = (
            {name: at(own, count) for name, own in self._bindings.settings_of[policy].items()}
            for policy, count in counts.items()
        )
        self._set(combined([of_sources, *of_rates]))

    def set_again(self) -> None:
        """Set all settings in the next update, if they have changed or not."""
        self._of_sources = None

    def restore(self) -> None:
        """Restore the settings of the optimizers' param groups."""
        if self._of_sources is not None:
            self._of_sources = None
            self._set({})

    def _set(self, settings: dict[str, Settings]) -> None:
        self.current, named = settings, self._bindings.named
        for optimizer in self._optimizers:
            optimizer.set_settings({named[name]: own for name, own in settings.items()})
