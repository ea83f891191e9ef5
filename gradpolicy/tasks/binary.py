"""A small network with binary weights and activations.

The model does not define gradients: it computes signs. Policies define their gradient, as in
``conf/policy/binary.yaml``.
"""

import torch
from torch import Tensor, nn
from torch.nn import functional

from gradpolicy.checks import check_sizes


class BinaryLinear(nn.Linear):
    """A linear layer with the signs of its weights, and no bias.

    Args:
        inputs: Input features.
        outputs: Output features.
    """

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Map features of shape (batch, inputs)."""
        return functional.linear(x, torch.sign(self.weight))


class Sign(nn.Module):
    """The sign of each entry."""

    def forward(self, x: Tensor) -> Tensor:
        """Take signs elementwise."""
        return torch.sign(x)


class BinaryPerceptron(nn.Module):
    """Two hidden layers with binary weights and activations, and normalisation between them.

    Args:
        inputs: Pixels of an image, over all channels.
        hidden: Units of each hidden layer.
        classes: Number of classes.

    Raises:
        PolicyError: For an impossible size.

    Source: Hubara, Courbariaux, Soudry, El-Yaniv, Bengio 2016 (binarized neural networks), arXiv:1602.02830.
    """

    def __init__(self, inputs: int = 64, hidden: int = 128, classes: int = 10) -> None:
        super().__init__()
        check_sizes("BinaryPerceptron", inputs=inputs, hidden=hidden, classes=classes)
        self.layers = nn.Sequential(
            nn.Sequential(BinaryLinear(inputs, hidden), nn.BatchNorm1d(hidden), Sign()),
            nn.Sequential(BinaryLinear(hidden, hidden), nn.BatchNorm1d(hidden), Sign()),
            nn.Sequential(BinaryLinear(hidden, classes), nn.BatchNorm1d(classes)),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Classify images of any shape (batch, …) with as many pixels as inputs."""
        return self.layers(images.flatten(1))
