"""Norms of the inputs of layers."""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.gradient_source import wide
from gradpolicy.tensors.sharding import sum_over_processes

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ActivationNorms:
    """Sums of squares of the input features of layers, by hooks on their forward passes.

    A forward pass is counted when the gradient of its output arrives, so once, also if it is recomputed.

    Args:
        model: The model.
        parameters: The weights of the layers by name.
        counts: A function that returns True if the current forward pass is counted.

    Attributes:
        squares: The sums by the names of the weights, in shapes that broadcast to the weights.

    Raises:
        PolicyError: If a parameter is not the weight of a ``Linear`` or ``Conv``.
    """

    def __init__(
        self, model: nn.Module, parameters: Mapping[str, Tensor], counts: Callable[[], bool]
    ) -> None:
        self.squares: dict[str, Tensor] = {}
        self.counts = counts
        layers: list[Any] = [module for module in model.modules() if isinstance(module, LAYERS)]
        layer_of = {name: layer for layer in layers for name, p in parameters.items() if p is layer.weight}
        for name in parameters:
            if name not in layer_of:
                raise PolicyError(
                    f"activation_norm: {shown(name)} is no weight of a Linear or Conv; leave it out of params"
                )
        self._hooks = [
            layer.register_forward_hook(partial(self._follow, name)) for name, layer in layer_of.items()
        ]

    def taken(self) -> dict[str, Tensor]:
        """Return the norms over the samples of all processes, and start again."""
        squares, self.squares = self.squares, {}
        return {name: sum_over_processes(each).sqrt() for name, each in squares.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    def _follow(self, name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and self.counts():
            output.register_hook(partial(self._add, name, squares_of(layer, inputs[0])))

    def _add(self, name: str, squares: Tensor, gradient: Tensor) -> None:
        self.squares[name] = self.squares[name] + squares if name in self.squares else squares


@torch.no_grad()
def squares_of(layer: Any, inputs: Tensor) -> Tensor:
    """Return the sum of squares of each input feature, in a shape that broadcasts to the layer's weight."""
    squares = wide(inputs.detach()).abs().square()
    if isinstance(layer, nn.Linear):
        return squares.flatten(0, -2).sum(0)[None] if squares.dim() > 1 else squares[None]
    spatial = layer.weight.dim() - 2
    channels = squares.movedim(-1 - spatial, 0).flatten(1).sum(1)
    # Each group of output channels has its own input channels.
    grouped = channels.reshape(layer.groups, -1).repeat_interleave(layer.out_channels // layer.groups, 0)
    return grouped.reshape(*grouped.shape, *(1,) * spatial)
