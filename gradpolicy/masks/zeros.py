"""Masks of the zeros of a checkpoint."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import warn_user
from gradpolicy.masks.base import StaticSource, on_devices
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import full_tensor, zero_outside


class Zeros(StaticSource):
    """Keeps entries at 0 that are 0 at the start of training, so that a pruned checkpoint remains sparse.

    Load the checkpoint before the start of training, when the zeros are read. A resumed run uses the zeros of
    the original start. Tensors with one dimension (biases, norms), which are often initialised to 0, always
    train.

    Args:
        **timetable: See :class:`~gradpolicy.masks.base.MaskSource`. It has no effect, and gives a warning.

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
        """Return the masks."""
        if all(mask is True for mask in self._masks.values()):
            warn_user("Zeros: no entry of a matrix is 0, so that all trains")
        return super().masks(step, epoch)

    @torch.no_grad()
    def apply(self) -> None:
        """Set masked entries to zero, which another policy may have modified."""
        for name, mask in self._masks.items():
            if isinstance(mask, Tensor):
                zero_outside(self.parameters[name].detach(), mask)

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, since the initial weights of a resumed run may differ."""
        return {"masks": dict(self._masks)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        self._masks = on_devices(state["masks"], self.parameters)
