"""The zeros of a checkpoint, which stay zero."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.masks.base import StaticSource
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import full_tensor, zero_outside


class Zeros(StaticSource):
    """What is 0 when training begins stays 0: a pruned checkpoint keeps its sparsity.

    The zeros are read from the weights at the start, so load the checkpoint before; a resumed run has those
    of its own start. Tensors with one dimension (biases, norms), which often begin at 0, train as ever.

    Args:
        **timetable: See :class:`~gradpolicy.masks.base.MaskSource`; a warning says that it makes no
            difference.

    Example:
        >>> import torch
        >>> source = Zeros()
        >>> source.setup({"fc.weight": torch.tensor([[0.5, 0.0], [0.0, -1.0]])}, seed=0)
        >>> source.masks(step=0, epoch=0)["fc.weight"].tolist()
        [[True, False], [False, True]]
    """

    def prepare(self) -> None:
        """Read the zeros."""
        self._masks = dict.fromkeys(self.parameters, True)
        for name, parameter in self.parameters.items():
            if parameter.dim() > 1 and not parameter.is_meta:
                nonzero = full_tensor(parameter.detach()) != 0
                self._masks[name] = nonzero if nonzero.any() else False
                if nonzero.all():
                    self._masks[name] = True

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the masks, whatever the step."""
        if all(mask is True for mask in self._masks.values()):
            warnings.warn("Zeros: no entry of a matrix is 0, so that all trains", stacklevel=2)
        return super().masks(step, epoch)

    @torch.no_grad()
    def apply(self) -> None:
        """Set to zero what was, also where another policy wrote to it."""
        for name, mask in self._masks.items():
            if isinstance(mask, Tensor):
                zero_outside(self.parameters[name].detach(), mask)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, since the weights that a resumed run begins with may be others."""
        return {"masks": dict(self._masks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        devices = {name: parameter.device for name, parameter in self.parameters.items()}
        self._masks = {
            name: mask.to(devices[name]) if isinstance(mask, Tensor) else mask
            for name, mask in state["masks"].items()
        }
