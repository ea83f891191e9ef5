"""Small image classifiers, built of distinct modules with telling names."""

from typing import NamedTuple

import torch
from torch import Tensor, nn


class Prediction(NamedTuple):
    """What a model with a probe gives.

    Attributes:
        logits: Unnormalised log-probabilities of the head, shape (batch, classes).
        probe_logits: The same from the probe.
    """

    logits: Tensor
    probe_logits: Tensor


class QuantizedReLU(nn.Module):
    """A ReLU with an upper bound of 1 and `levels` + 1 evenly spaced values.

    Formula: ``round(levels · min(relu(x), 1)) / levels``. The derivative of `round` is zero almost
    everywhere: without a straight-through policy on it nothing before it learns. (The quantised activation
    of Zhou et al., "DoReFa-Net", 2016, arXiv:1606.06160.)

    Args:
        levels: Number of steps between 0 and 1.
    """

    def __init__(self, levels: int = 4) -> None:
        super().__init__()
        self.levels = levels
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Quantises elementwise."""
        bounded = self.relu(x).clamp(max=1.0)
        return torch.round(bounded * self.levels) / self.levels

    def extra_repr(self) -> str:
        """Says the number of steps."""
        return f"levels={self.levels}"


class QuantizedBlock(nn.Sequential):
    """Convolution 3×3, normalisation over all channels, quantised activation.

    Args:
        inputs: Input channels.
        outputs: Output channels.
        stride: 1 keeps the size of the image, 2 halves it.
        levels: Steps of the activation.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, levels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, outputs)
        self.activation = QuantizedReLU(levels)


class QuantizedConvNet(nn.Module):
    """A small convolutional network with quantised activations and a probe beside its head.

    `trunk` makes the features, `head` classifies them, `probe` classifies them as well and is meant to
    measure the trunk without shaping it. That is not done here: declare ``gp.Stop(modules="*.probe")``.

    Args:
        channels: Channels of the images.
        size: Height and width of the images in pixels.
        classes: Number of classes.
        width: Channels of the first block; the later ones have twice as many.
        levels: Steps of the quantised activations between 0 and 1.
        dropout: Share of the features that head and probe, each for itself, do not see in training.
    """

    def __init__(
        self,
        channels: int = 1,
        size: int = 8,
        classes: int = 10,
        width: int = 32,
        levels: int = 4,
        dropout: float = 0.25,
    ) -> None:
        super().__init__()
        self.trunk = nn.Sequential()
        self.trunk.add_module("block1", QuantizedBlock(channels, width, 1, levels))
        self.trunk.add_module("block2", QuantizedBlock(width, 2 * width, 2, levels))
        self.trunk.add_module("block3", QuantizedBlock(2 * width, 2 * width, 1, levels))
        features = 2 * width * ((size + 1) // 2) ** 2
        self.head = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, classes))
        self.probe = nn.Sequential(nn.Flatten(), nn.Dropout(dropout), nn.Linear(features, classes))

    def forward(self, images: Tensor) -> Prediction:
        """Classifies images of shape (batch, channels, size, size)."""
        features = self.trunk(images)
        return Prediction(self.head(features), self.probe(features))
