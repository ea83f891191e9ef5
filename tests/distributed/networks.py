"""The network that tests of many processes train."""

from itertools import pairwise

import torch
from process_pool import here
from torch import nn


def perceptron(*widths: int) -> nn.Sequential:
    """Linear layers with Tanh between them, the same on every rank and in every test."""
    torch.manual_seed(3)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(here())
