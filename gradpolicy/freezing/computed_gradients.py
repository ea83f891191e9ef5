"""The gradients that the backward pass computes: none that nobody needs."""

from torch import Tensor

from gradpolicy.freezing.bindings import Bindings
from gradpolicy.freezing.combined_masks import CombinedMasks
from gradpolicy.freezing.requires_grad import RequiresGrad, is_turned_off
from gradpolicy.freezing.row_gradients import RowGradients
from gradpolicy.tensors.sharding import is_sharded


class ComputedGradients:
    """Leaves gradients of frozen tensors, and of frozen rows, out of the backward pass.

    Args:
        bindings: The bound policies.
        masks: The combined masks.
        toggle: Disable ``requires_grad`` of tensors that are frozen completely, unless a source needs their
            gradients.

    Attributes:
        dropped: Parameters whose gradients are computed in this update, but dropped like those of updates in
            which ``requires_grad`` is disabled.
    """

    def __init__(self, bindings: Bindings, masks: CombinedMasks, *, toggle: bool) -> None:
        self._bindings, self._masks, self._toggle = bindings, masks, toggle
        self.dropped: set[Tensor] = set()
        # FSDP2's first pass takes the dtypes of a block from its parameters that require a gradient.
        self._computes_all = any(map(is_sharded, bindings.model.parameters()))
        self._rows = RowGradients(bindings.model)
        self._wanted: set[str] = set()
        self._requires_grad = RequiresGrad(bindings.model, bindings.optimized.values())

    def update(self, wanted: set[str], *, changed: bool) -> None:
        """Choose the gradients of an update.

        Args:
            wanted: The names of parameters whose full gradients mask sources need.
            changed: True if masks have changed.
        """
        if not (changed or wanted != self._wanted or self.dropped):
            return
        self._wanted = wanted
        parameters = self._bindings.parameters
        current = {
            p: self._masks.current.get(name, True) for name, p in parameters.items() if name not in wanted
        }
        self._rows.set(current)
        if not self._toggle:
            return
        idle = self._masks.frozen() - wanted
        self.dropped.clear()
        if self._computes_all:
            self.dropped.update(parameters[name] for name in idle)
        else:
            self._requires_grad.turn_off(idle)

    def observe(self) -> None:
        """Check that layers which train were in a graph, and remove gradients that are dropped."""
        self._requires_grad.check_graphs()
        for parameter in self.dropped:
            parameter.grad = None
        self._computes_all = False

    def join(self) -> None:
        """Start again with the parameters that the optimizers have now."""
        self._requires_grad.restore()
        self._requires_grad = RequiresGrad(self._bindings.model, self._bindings.optimized.values())
        self._wanted = set()

    def compute_all(self) -> bool:
        """Compute all gradients from now on, and return True if some are not in this update."""
        parameters = self._bindings.parameters.values()
        skips, self._toggle = self._rows.active or any(map(is_turned_off, parameters)), False
        self.dropped.clear()
        self.restore()
        return skips

    def restore(self) -> None:
        """Restore ``requires_grad`` of all parameters."""
        self._requires_grad.restore()
        self._rows.release()
