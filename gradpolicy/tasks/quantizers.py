"""Quantised weights and activations: forward values only. Policies supply the gradients.

Each rounding is an operation that a policy can name: ``round`` in :class:`DoReFaWeight` and in
:class:`~gradpolicy.tasks.models.QuantizedReLU`, and the functions :func:`quantize` and
:func:`clip_and_quantize` by their dotted paths. Without a policy the layers before them do not learn.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import register_parametrization
from torch.overrides import handle_torch_function, has_torch_function

from gradpolicy.checks import check_whole
from gradpolicy.where import match_names


def quantize(values: Tensor, step: Tensor, lowest: int, highest: int, offset: Tensor | None = None) -> Tensor:
    """Round to a uniform grid: ``round(clamp((v − β) / s, lowest, highest)) · s + β``; without β, it is 0.

    An operation: rules (``lsq``, ``lsq_plus``) get ``(values, step)`` or ``(values, step, offset)``.

    Args:
        values: v, of any shape.
        step: s, the distance of the grid's points; broadcasts to the values.
        lowest: Index of the grid's first point.
        highest: Index of the grid's last point.
        offset: β, the position of the point with index 0; broadcasts to the values.

    Example:
        >>> quantize(torch.tensor([0.3, 0.9, 9.0]), torch.tensor(0.5), -8, 7)
        tensor([0.5000, 1.0000, 3.5000])
    """
    tensors = (values, step) if offset is None else (values, step, offset)
    if has_torch_function(tensors):
        arguments = (values, step, lowest, highest, *tensors[2:])
        return handle_torch_function(quantize, tensors, *arguments)
    shift = 0.0 if offset is None else offset
    return torch.round(torch.clamp((values - shift) / step, lowest, highest)) * step + shift


def clip_and_quantize(values: Tensor, clip: Tensor, levels: int) -> Tensor:
    """Clip to ``[0, α]`` and round to multiples of ``α / levels``.

    An operation: its rule (``pact``) gets ``(values, clip)``.

    Args:
        values: A tensor of any shape.
        clip: α, a scalar above 0.
        levels: Steps between 0 and α.

    Example:
        >>> clip_and_quantize(torch.tensor([-1.0, 0.4, 9.0]), torch.tensor(3.0), 3)
        tensor([0., 0., 3.])
    """
    if has_torch_function((values, clip)):
        return handle_torch_function(clip_and_quantize, (values, clip), values, clip, levels)
    bounded = torch.minimum(values.clamp(min=0.0), clip)
    return torch.round(bounded * (levels / clip)) * (clip / levels)


class DoReFaWeight(nn.Module):
    """DoReFa's weights, for ``parametrize``: ``2 q(tanh(w) / (2 max|tanh(w)|) + ½) − 1``, q rounding to bits.

    Its policy is ``StraightThrough(ops=["round"])``. Activations are
    :class:`~gradpolicy.tasks.models.QuantizedReLU` with ``2ᵇ − 1`` levels.

    Args:
        bits: b, at least 2.

    Source: Zhou et al. 2016, arXiv:1606.06160, equation 9.
    """

    def __init__(self, bits: int = 4) -> None:
        super().__init__()
        self.levels = 2 ** check_whole("DoReFaWeight.bits", bits, least=2, most=16) - 1

    def forward(self, weight: Tensor) -> Tensor:
        """Quantise to ``[−1, 1]``."""
        bounded = torch.tanh(weight)
        unit = bounded / (2 * bounded.abs().max()) + 0.5
        return 2 * (torch.round(unit * self.levels) / self.levels) - 1


class PACT(nn.Module):
    """An activation that clips between 0 and a learned α and rounds; replaces a ReLU.

    Its policy is ``UseRule("pact", ops=["gradpolicy.tasks.quantizers.clip_and_quantize"])``.

    Args:
        bits: b; there are ``2ᵇ − 1`` steps between 0 and α.
        clip: The initial value of α.

    Source: Choi et al. 2018, arXiv:1805.06085.
    """

    def __init__(self, bits: int = 4, clip: float = 10.0) -> None:
        super().__init__()
        self.levels = 2 ** check_whole("PACT.bits", bits, least=1, most=16) - 1
        self.clip = nn.Parameter(torch.tensor(float(clip)))

    def forward(self, values: Tensor) -> Tensor:
        """Clip and quantise elementwise."""
        return clip_and_quantize(values, self.clip, self.levels)


class LSQ(nn.Module):
    """A uniform grid with a learned step: for weights by ``parametrize``, or as a replacement of a ReLU.

    Its policy is ``UseRule("lsq", ops=["gradpolicy.tasks.quantizers.quantize"])`` with the same bits and
    sign. As a parametrization it initialises the step from the weights, by the paper's ``2 ⟨|w|⟩ / √Qₚ``.

    Args:
        bits: b, the width of the grid.
        signed: Use a grid from ``−2ᵇ⁻¹`` to ``2ᵇ⁻¹ − 1`` instead of one from 0 to ``2ᵇ − 1``.
        magnitude: The expected mean magnitude ``⟨|v|⟩`` of activations at the start.

    Source: Esser et al. 2020, arXiv:1902.08153.
    """

    def __init__(self, bits: int = 4, signed: bool = True, magnitude: float = 1.0) -> None:
        super().__init__()
        points = 2 ** check_whole("LSQ.bits", bits, least=2 if signed else 1, most=16)
        self.lowest = -points // 2 if signed else 0
        self.highest = self.lowest + points - 1
        self.step = nn.Parameter(torch.tensor(2 * magnitude / math.sqrt(self.highest)))

    def forward(self, values: Tensor) -> Tensor:
        """Quantise elementwise."""
        return quantize(values, self.step, self.lowest, self.highest)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Initialise the step from weights; ``parametrize`` calls this when a weight is assigned."""
        with torch.no_grad():
            self.step.copy_(2 * weight.abs().mean() / math.sqrt(self.highest))
        return weight


class LSQPlus(nn.Module):
    """A uniform grid with learned step and offset; replaces an activation.

    Its policy is ``UseRule("lsq_plus", ops=["gradpolicy.tasks.quantizers.quantize"])`` with the same bits.

    Args:
        bits: b; the grid has ``2ᵇ`` points.
        low: The initial position of the first point.
        high: The initial position of the last point.

    Source: Bhalgat et al. 2020, arXiv:2004.09576.
    """

    def __init__(self, bits: int = 4, low: float = 0.0, high: float = 4.0) -> None:
        super().__init__()
        self.highest = 2 ** check_whole("LSQPlus.bits", bits, least=1, most=16) - 1
        self.step = nn.Parameter(torch.tensor((high - low) / self.highest))
        self.offset = nn.Parameter(torch.tensor(float(low)))

    def forward(self, values: Tensor) -> Tensor:
        """Quantise elementwise."""
        return quantize(values, self.step, 0, self.highest, self.offset)


class Quantized(nn.Module):
    """Quantises every ReLU of a model, and the weights of its linear layers and convolutions.

    Args:
        model: The model, which is changed in place.
        weights: A function that returns the parametrization of a weight, as from Hydra's ``_partial_: true``.
        activations: A function that returns the replacement of an ``nn.ReLU``.
        keep: Globs on the names of layers whose weights are not quantised, such as the last one.

    Raises:
        PolicyError: If a glob matches no such layer.

    Example:
        >>> model = Quantized(nn.Sequential(nn.Linear(2, 2), nn.ReLU()), LSQ, PACT)
        >>> for name, _ in model.named_parameters():
        ...     print(name)
        model.0.bias
        model.0.parametrizations.weight.original
        model.0.parametrizations.weight.0.step
        model.1.clip
    """

    def __init__(
        self,
        model: nn.Module,
        weights: Callable[[], nn.Module],
        activations: Callable[[], nn.Module],
        keep: Iterable[str] = (),
    ) -> None:
        super().__init__()
        self.model = model
        modules = dict(model.named_modules())
        layers = {name for name, module in modules.items() if isinstance(module, nn.Linear | nn.Conv2d)}
        kept = match_names(list(keep), sorted(layers), "layer") if keep else ()
        for name in layers.difference(kept):
            register_parametrization(modules[name], "weight", weights())
        for module in modules.values():
            for name, child in list(module.named_children()):
                if isinstance(child, nn.ReLU):
                    setattr(module, name, activations())

    def forward(self, *inputs: Any) -> Any:
        """Return the model's output."""
        return self.model(*inputs)
