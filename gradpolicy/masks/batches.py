"""Activation norms, and sums over the loader of a score."""

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only

from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.gradient_source import STATISTICS, wide
from gradpolicy.masks.scores.score import Score
from gradpolicy.tensors.sharding import is_sharded, sum_over_processes

Sums = dict[str, dict[str, Tensor]]


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
        self, model: nn.Module, parameters: Mapping[str, Tensor], counts: Callable[[], bool] = lambda: True
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


def sums_over_loader(
    model: nn.Module, parameters: Mapping[str, Tensor], score: Score, batches: Iterable[Any]
) -> Sums:
    """Return the inputs of a score, summed over batches of its own loader.

    Raises:
        PolicyError: If the parameters are sharded, or the loader has no batches.
    """
    sharded = next((name for name, p in parameters.items() if is_sharded(p)), None)
    if sharded is not None:
        raise PolicyError(
            f"score {score!r}: {shown(sharded)} is sharded; a loader of its own takes whole tensors"
        )
    training = {module: module.training for module in model.modules()}
    needing = {parameter: parameter.requires_grad for parameter in parameters.values()}
    statistics = [each for each in score.asks if each in STATISTICS]
    norms = ActivationNorms(model, parameters) if "activation_norm" in score.asks else None
    sums: Sums = {each: {} for each in statistics}
    loss = None
    try:
        model.eval()
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        device = next(iter(parameters.values())).device
        for batch in _pieces(batches, score.by_sample, device):
            with torch.enable_grad():
                loss = score.loss(model, batch)
            if not statistics:
                continue
            gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                for each in statistics if gradient is not None else ():
                    value = STATISTICS[each](parameter.detach(), wide(gradient))
                    sums[each][name] = sums[each][name] + value if name in sums[each] else value
    finally:
        if norms is not None:
            norms.close()
        for parameter, needed in needing.items():
            parameter.requires_grad_(needed)
        for module, was in training.items():
            module.training = was
    if loss is None:
        raise PolicyError(f"score {score!r}: its loader gives no batch")
    if norms is not None:
        sums["activation_norm"] = {name: each.sqrt() for name, each in norms.squares.items()}
    return sums


def norms_of_all(squares: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the norms over the samples of all processes."""
    return {name: sum_over_processes(each).sqrt() for name, each in squares.items()}


def _pieces(batches: Iterable[Any], by_sample: bool, device: torch.device) -> Iterator[Any]:
    """Yield the batches on a device, or their samples as batches of size 1."""
    for batch in batches:
        batch = tree_map_only(Tensor, lambda tensor: tensor.to(device), batch)
        if not by_sample:
            yield batch
            continue
        count = next(len(each) for each in tree_leaves(batch) if isinstance(each, Tensor))
        for place in range(count):
            yield tree_map_only(Tensor, operator.itemgetter(slice(place, place + 1)), batch)
