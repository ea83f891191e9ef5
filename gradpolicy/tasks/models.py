"""Small image classifiers in which every activation is its own module."""

from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gradpolicy.checks import check_share, check_sizes


class Prediction(NamedTuple):
    """The output of a model with a probe.

    Attributes:
        logits: Unnormalised log-probabilities of the head, shape (batch, classes).
        probe_logits: Those of the probe.
    """

    logits: Tensor
    probe_logits: Tensor


class QuantizedReLU(nn.Module):
    """A ReLU with an upper bound of 1 and `levels` + 1 evenly spaced values.

    Formula: ``round(levels · min(relu(x), 1)) / levels``. The derivative of `round` is zero almost
    everywhere: without a straight-through policy, the layers before it do not learn.

    Args:
        levels: Number of steps between 0 and 1.

    Raises:
        PolicyError: If `levels` is below 1.

    Source: the quantised activation of DoReFa-Net, Zhou et al. 2016, arXiv:1606.06160.
    """

    def __init__(self, levels: int = 4) -> None:
        super().__init__()
        check_sizes("QuantizedReLU", levels=levels)
        self.levels = levels
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Quantise elementwise."""
        return torch.round(self.relu(x).clamp(max=1.0) * self.levels) / self.levels


class MultilayerPerceptron(nn.Module):
    """Fully connected layers with ReLUs between them.

    Args:
        inputs: Pixels of an image, over all channels.
        hidden: Units of each hidden layer.
        classes: Number of classes.

    Raises:
        PolicyError: For an impossible size.
    """

    def __init__(self, inputs: int = 784, hidden: Sequence[int] = (300, 100), classes: int = 10) -> None:
        super().__init__()
        check_sizes("MultilayerPerceptron", inputs=inputs, classes=classes)
        for units in hidden:
            check_sizes("MultilayerPerceptron", hidden=units)
        sizes = [inputs, *hidden]
        self.trunk = nn.Sequential(*(nn.Sequential(nn.Linear(*pair), nn.ReLU()) for pair in pairwise(sizes)))
        self.head = nn.Linear(sizes[-1], classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images of any shape (batch, …) with as many pixels as inputs."""
        return self.head(self.trunk(images.flatten(1)))


class QuantizedConvNet(nn.Module):
    """A small convolutional network with quantised activations, a head and a probe.

    `trunk` computes features, and `head` classifies them. `probe` classifies them too, to evaluate the trunk
    without training it, for which a policy is needed: ``gp.Stop(modules="*.probe")``.

    Args:
        size: Height and width of the images in pixels.
        classes: Number of classes.
        width: Channels of the first block; the later ones have twice as many.
        levels: Steps of the quantised activations between 0 and 1.
        dropout: The dropout probability of the features.

    Raises:
        PolicyError: For an impossible size.
    """

    def __init__(
        self, size: int = 8, classes: int = 10, width: int = 32, levels: int = 4, dropout: float = 0.25
    ) -> None:
        super().__init__()
        check_sizes("QuantizedConvNet", size=size, classes=classes, width=width, levels=levels)
        check_share("QuantizedConvNet.dropout", dropout)
        self.trunk = nn.Sequential(
            _block(1, width, 1, levels),
            _block(width, 2 * width, 2, levels),
            _block(2 * width, 2 * width, 1, levels),
        )
        self.dropout = nn.Dropout(dropout)
        features = 2 * width * ((size + 1) // 2) ** 2
        self.head, self.probe = nn.Linear(features, classes), nn.Linear(features, classes)

    def forward(self, images: Tensor) -> Prediction:
        """Classify images of shape (batch, 1, size, size)."""
        features = self.dropout(self.trunk(images).flatten(1))
        return Prediction(self.head(features), self.probe(features))


def _block(inputs: int, outputs: int, stride: int, levels: int) -> nn.Sequential:
    """Return a 3×3 convolution, normalisation over all channels, and a quantised activation."""
    conv = nn.Conv2d(inputs, outputs, kernel_size=3, stride=stride, padding=1, bias=False)
    return nn.Sequential(
        OrderedDict(conv=conv, norm=nn.GroupNorm(1, outputs), activation=QuantizedReLU(levels))
    )
