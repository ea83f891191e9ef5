"""A model that checkpoints activations, for ``model.model._target_=soaking.models.Checkpointed``."""

from typing import Any

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from gradpolicy.tasks import QuantizedConvNet


class Trunk(nn.Sequential):
    """Computes each block again in the backward pass."""

    def forward(self, images: Tensor) -> Tensor:
        """Compute the features."""
        for block in self:
            images = checkpoint(block, images, use_reentrant=False)
        return images


class Checkpointed(QuantizedConvNet):
    """The model of the default job with such a trunk."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.trunk = Trunk(*self.trunk)
