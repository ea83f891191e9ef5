"""A small network of leaky integrate-and-fire neurons.

The model does not define gradients: a spike is ``(potential > threshold).float()``. A policy defines the
gradient of a spike, as in ``conf/policy/spiking.yaml``.
"""

import torch
from torch import Tensor, nn

from gradpolicy.checks import check_share, check_sizes


class Neurons(nn.Module):
    """Leaky integrate-and-fire neurons with a threshold of 1.

    Formula, at each step: ``v = decay · v + current``, ``spike = 1[v − 1 > 0]``, ``v = v − spike``.

    Args:
        decay: The share of the potential that is kept from step to step, between 0 and 1.
    """

    def __init__(self, decay: float = 0.9) -> None:
        super().__init__()
        check_share("Neurons.decay", decay)
        self.decay = decay

    def forward(self, potential: Tensor, current: Tensor) -> tuple[Tensor, Tensor]:
        """Do one step; return the spikes and the new potential."""
        potential = self.decay * potential + current
        spikes = (potential - 1 > 0).float()
        return spikes, potential - spikes


class SpikingNetwork(nn.Module):
    """A hidden layer of spiking neurons, and a readout of their mean rate.

    An image is a constant current over all steps.

    Args:
        inputs: Pixels of an image, over all channels.
        hidden: Number of spiking neurons.
        classes: Number of classes.
        steps: Number of time steps.
        decay: See :class:`Neurons`.

    Raises:
        PolicyError: For an impossible size.
    """

    def __init__(
        self, inputs: int = 64, hidden: int = 64, classes: int = 10, steps: int = 10, decay: float = 0.9
    ) -> None:
        super().__init__()
        check_sizes("SpikingNetwork", inputs=inputs, hidden=hidden, classes=classes, steps=steps)
        self.steps = steps
        self.currents = nn.Linear(inputs, hidden)
        self.neurons = Neurons(decay)
        self.readout = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Classify images of any shape (batch, …) with as many pixels as inputs."""
        current = self.currents(images.flatten(1))
        potential, count = torch.zeros_like(current), torch.zeros_like(current)
        for _ in range(self.steps):
            spikes, potential = self.neurons(potential, current)
            count = count + spikes
        return self.readout(count / self.steps)
