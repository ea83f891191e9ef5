"""The scores of :class:`~gradpolicy.masks.TopK`, their inputs, and users' functions as scores."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from gradpolicy.checks import check_integer
from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.imports import import_by_name
from gradpolicy.masks.gradient_source import wide
from gradpolicy.where import ModelHook

INPUTS = ("weight", "initial", "gradient", "product", "second_moment", "activation_norm")
"""The valid names of a score's arguments."""
GATHERED = ("gradient", "product", "second_moment", "activation_norm")
"""The inputs that are summed over training steps."""
ROWS = 256
"""The number of rows of a matrix that are converted at a time."""
LEAST_SHARE = 1e-2
"""The ratio of the ``r``-th to the largest eigenvalue below which double precision is used.

The eigenvalues are squares of singular values ``σ``, so that the error of the subspace is ``σ₁ / 2σᵣ`` times
that of a singular value decomposition: here at most 5 times.
"""


@dataclass(frozen=True)
class Score:
    """The scores of the entries of a parameter, as a function of inputs.

    Its inputs are determined by the names of the arguments. All but the last have the parameter's shape:

    ===================  ===================================================================================
    ``weight``           the weight ``w``
    ``initial``          the weight at the start of training
    ``gradient``         ``Σ g``
    ``product``          ``Σ w · g``
    ``second_moment``    ``Σ g²``
    ``activation_norm``  ``‖xⱼ‖₂`` of each input feature ``j`` of a ``Linear`` or ``Conv``, over all samples
                         and positions; it broadcasts to the weight
    ===================  ===================================================================================

    The sums are over training steps before a choice.

    Attributes:
        name: The name in reports.
        formula: The function, which returns the scores in the weight's shape.
        asks: The names of its inputs.
    """

    name: str
    formula: Callable[..., Tensor]
    asks: tuple[str, ...]


def as_score(key: str, by: object, named: Mapping[str, Callable[..., Tensor]]) -> Score:
    """Return the score for a name, a dotted path or a function.

    Args:
        key: The name of the argument, for errors.
        by: The name, path or function.
        named: The functions by name.

    Raises:
        PolicyError: If it is of another type, or an input of the score does not exist.
    """
    if isinstance(by, str) and by not in named and "." not in by:
        raise unknown("value", by, named, key=key)
    formula = (named[by] if by in named else import_by_name(by)) if isinstance(by, str) else by
    if isinstance(formula, type) or not callable(formula):
        raise PolicyError(f"{key}: expected a name or a function, got {shown(formula)}")
    name = by if isinstance(by, str) else getattr(by, "__name__", repr(by))
    asks = tuple(
        each.name
        for each in inspect.signature(formula).parameters.values()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    )
    for each in asks:
        if each not in INPUTS:
            raise unknown("input", each, INPUTS, key=f"score {name}")
    return Score(name, formula, asks)


# ---- formulas


def magnitude(weight: Tensor) -> Tensor:
    """Return ``|w|``.

    Source: Han et al. 2015, arXiv:1506.02626.
    """
    return weight.abs()


def gradient_magnitude(gradient: Tensor) -> Tensor:
    """Return ``|Σ g|``."""
    return gradient.abs()


def snip(product: Tensor) -> Tensor:
    """Return ``|Σ w · g|``.

    Source: Lee, Ajanthan, Torr 2019, arXiv:1810.02340.
    """
    return product.abs()


def movement(product: Tensor) -> Tensor:
    """Return ``−Σ w · g``.

    Source: Sanh, Wolf, Rush 2020, arXiv:2005.07683.
    """
    return -product


def change(weight: Tensor, initial: Tensor) -> Tensor:
    """Return ``|w − w₀|``.

    Source: Ansell et al. 2022, arXiv:2110.07560 (LT-SFT).
    """
    return (weight - initial).abs()


def fisher(second_moment: Tensor) -> Tensor:
    """Return ``Σ g²`` of the gradients of batches: Child-Tuning_D.

    Source: Xu et al. 2021, arXiv:2109.05687.
    """
    return second_moment


def wanda(weight: Tensor, activation_norm: Tensor) -> Tensor:
    """Return ``|wᵢⱼ| · ‖xⱼ‖₂``; compared within each row in the paper (``within="row"``).

    Source: Sun et al. 2024, arXiv:2306.11695.
    """
    return weight.abs() * activation_norm


class LIFT:
    """``|U_r S_r V_rᵀ|``, the best approximation of rank ``r`` of a weight matrix.

    Args:
        rank: The rank ``r``; a matrix of a lower rank is unchanged.

    Source: Liu et al. 2025, arXiv:2506.00772.
    """

    def __init__(self, rank: int = 128) -> None:
        self.rank = check_integer("LIFT.rank", rank, least=1)

    def __call__(self, weight: Tensor) -> Tensor:
        """Return the scores."""
        if weight.dim() < 2:
            raise PolicyError("LIFT: is of matrices; leave vectors such as biases out of params")
        return approximation(weight.flatten(1), self.rank).abs().reshape(weight.shape)

    def __repr__(self) -> str:
        return f"LIFT(rank={self.rank})"


def approximation(matrix: Tensor, rank: int) -> Tensor:
    """Return the best approximation of rank ``r``, ``W V_r V_rᴴ``.

    ``V_r`` are the eigenvectors of ``WᴴW`` with the largest eigenvalues, which need less time and memory
    than a singular value decomposition.

    Args:
        matrix: ``W``, in single or double precision.
        rank: The rank ``r``.
    """
    if rank >= min(matrix.shape):
        return matrix
    if matrix.shape[0] < matrix.shape[1]:
        return approximation(matrix.mH, rank).mH
    for dtype in dict.fromkeys((matrix.dtype, torch.promote_types(matrix.dtype, torch.float64))):
        values, vectors = torch.linalg.eigh(_gram(matrix, dtype))
        if values[-rank] > LEAST_SHARE * values[-1]:
            break
    basis = vectors[:, -rank:].to(matrix.dtype)
    return matrix @ basis @ basis.mH


def _gram(matrix: Tensor, dtype: torch.dtype) -> Tensor:
    """Return ``WᴴW`` in a dtype."""
    gram = matrix.new_zeros(matrix.shape[1], matrix.shape[1], dtype=dtype)
    for rows in matrix.split(ROWS):
        rows = rows.to(dtype)
        gram.addmm_(rows.mH, rows)
    return gram


SCORES: dict[str, Callable[..., Tensor]] = {
    "gradient": gradient_magnitude,
    "magnitude": magnitude,
    "weight": magnitude,
    "fisher": fisher,
    "movement": movement,
    "change": change,
    "snip": snip,
    "wanda": wanda,
    "lift": LIFT(),
}
"""All scores by their names for ``by``."""


# ---- norms of the inputs of layers

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)


def follow_inputs(
    model: nn.Module,
    parameters: Mapping[str, Tensor],
    counts: Callable[[], bool],
    add: Callable[[str, Tensor], None],
) -> list[RemovableHandle]:
    """Follow the inputs of layers, by hooks on their forward passes.

    A forward pass is counted when the gradient of its output arrives, so once, also if it is recomputed.

    Args:
        model: The model.
        parameters: The weights of the layers by name.
        counts: A function that returns True if the current forward pass is counted.
        add: Called with the name of a weight and the result of :func:`squares_of`.

    Returns:
        The handles of the hooks.

    Raises:
        PolicyError: If a parameter is not the weight of a ``Linear`` or ``Conv``.
    """
    layers: list[Any] = [module for module in model.modules() if isinstance(module, LAYERS)]
    layer_of = {name: layer for layer in layers for name, p in parameters.items() if p is layer.weight}
    for name in parameters:
        if name not in layer_of:
            raise PolicyError(
                f"activation_norm: {shown(name)} is no weight of a Linear or Conv; leave it out of params"
            )

    def follow(name: str, layer: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if output.requires_grad and counts():
            squares = squares_of(layer, inputs[0])
            output.register_hook(lambda gradient: add(name, squares))

    return [layer.register_forward_hook(ModelHook(partial(follow, name))) for name, layer in layer_of.items()]


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
