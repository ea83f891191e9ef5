"""Norms of the inputs of layers."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.gradient_source import wide
from gradpolicy.tensors.sharding import sum_over_processes


class ActivationNorms:
    """Sums of squares of the input features of layers, by hooks on their forward passes.

    Forward passes in training mode or with gradients are counted, but not recomputations in the backward
    pass.

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
        layers = [each for each in model.modules() if isinstance(each, nn.Linear | nn.modules.conv._ConvNd)]
        self._names = {
            id(each): name for each in layers for name, p in parameters.items() if p is each.weight
        }
        for name in parameters:
            if name not in self._names.values():
                raise PolicyError(
                    f"activation_norm: {shown(name)} is no weight of a Linear or Conv; leave it out of params"
                )
        self._hooks = [
            each.register_forward_pre_hook(self._add) for each in layers if id(each) in self._names
        ]

    def taken(self) -> dict[str, Tensor]:
        """Return the norms over the samples of all processes, and start again."""
        squares, self.squares = self.squares, {}
        return {name: sum_over_processes(each).sqrt() for name, each in squares.items()}

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()

    @torch.no_grad()
    def _add(self, layer: Any, inputs: tuple) -> None:
        name = self._names.get(id(layer))
        trains = layer.training or torch.is_grad_enabled()
        if name is None or not (trains and self.counts()) or torch._C._current_graph_task_id() != -1:
            return
        x = wide(inputs[0].detach())
        if isinstance(layer, nn.Linear):
            squares = x.abs().square().flatten(0, -2).sum(0) if x.dim() > 1 else x.abs().square()
            squares = squares[None]
        else:
            spatial = layer.weight.dim() - 2
            channels = x.abs().square().movedim(-1 - spatial, 0).flatten(1).sum(1)
            # Each group of output channels has its own input channels.
            grouped = channels.reshape(layer.groups, -1)
            squares = grouped.repeat_interleave(layer.out_channels // layer.groups, 0)
            squares = squares.reshape(*squares.shape, *(1,) * spatial)
        self.squares[name] = self.squares[name] + squares if name in self.squares else squares
