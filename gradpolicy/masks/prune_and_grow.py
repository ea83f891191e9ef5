"""Sparse training with a changing topology (SET, RigL)."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_choice, check_share
from gradpolicy.errors import PolicyError, shown
from gradpolicy.masks.gradient_source import GradientSource
from gradpolicy.masks.selection import (
    DISTRIBUTIONS,
    ROUNDING,
    Density,
    densities,
    density_at,
    density_of_level,
    highest,
)
from gradpolicy.schedules import Constant, Cosine, Linear, Ramp, Schedule
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.pattern import Pattern, pattern_of
from gradpolicy.tensors.seeded import check_level, derive, words_at
from gradpolicy.tensors.sharding import full_tensor, write_entries, zero_outside

RULES = {"gradient": "cosine", "random": "constant"}
"""The values of ``grow``, with their default of ``anneal``."""
ANNEALS: dict[str, type[Ramp]] = {"cosine": Cosine, "linear": Linear}


class PruneAndGrow(GradientSource):
    """Trains a sparse network, and periodically replaces its smallest weights by others.

    Initially each weight tensor has a random mask of its density. At each change, of its ``n`` active entries

    1. a fraction ``f(t)``, rounded down, is dropped;
    2. the same number is grown among all inactive entries, including those just dropped.

    Entries outside of the mask are zero. The two published rules are

    =========================  =========================  =============================================
    ``grow``                   ``"gradient"``: RigL       ``"random"``: SET
    =========================  =========================  =============================================
    dropped                    smallest ``|w|``           the same fraction of the positive and of the
                                                          negative entries nearest to zero; blocks by
                                                          ``|w|``
    grown                      largest ``|Σ g|`` of the   random
                               ``window`` steps before
    first value                0                          normal, with the initial standard deviation
                                                          of the tensor
    ``anneal`` of ``f(t)``     cosine                     constant
    dropped and grown at once  keeps its value            gets a new one
    =========================  =========================  =============================================

    ``f(t) = ½ α (1 + cos(π t / T))`` for ``anneal="cosine"``, with ``t`` counted from ``start`` and ``T`` =
    ``stop − start``. With ``frozen_state="zero"`` or ``"drop"`` grown entries start with empty moments.

    Tensors with one dimension (biases, norms) are dense, and so is what the policy's ``params`` leave out.

    Args:
        density: The fraction of active entries; a number or a schedule of the count. None: 0.1, or that of
            the level.
        level: The unit that is dropped and grown: ``"entry"``, blocks (``"16x16"``, by their mean scores), or
            ``"2:4"``: entries, of which 2 of every 4 of a row are always active.
        grow: ``"gradient"`` (RigL) or ``"random"`` (SET).
        fraction: ``α``, the initial fraction.
        anneal: The schedule of the fraction: ``"cosine"``, ``"linear"`` or ``"constant"``; None: the setting
            in the table, but ``"constant"`` without ``stop``.
        distribution: ``"uniform"`` (the same density for all tensors) or ``"erk"`` (Erdős–Rényi–kernel:
            small tensors are denser, with the same total density).
        window: The number of steps (or epochs) over which gradients are summed.
        every: The number of steps (or epochs) between changes of the topology.
        **timetable: ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`. The topology is
            constant from ``stop``, in RigL after 75 % of the training. Cosine and linear annealing need it.

    Raises:
        PolicyError: For an unknown option, a missing ``stop``, or if all parameters are dense.

    Source: Mocanu et al. 2018, Nature Communications 9:2383 (SET); Evci et al. 2020, "Rigging the Lottery",
    arXiv:1911.11134 (RigL, ERK).

    Example:
        >>> import torch
        >>> source = PruneAndGrow(density=0.25, grow="random", every=10, stop=100)
        >>> source.setup({"fc.weight": torch.randn(4, 8), "fc.bias": torch.randn(4)}, seed=0)
        >>> masks = source.masks(step=0, epoch=0)
        >>> int(masks["fc.weight"].sum()), masks["fc.bias"]
        (8, True)
    """

    def __init__(
        self,
        density: float | Density | None = None,
        *,
        level: str = "entry",
        grow: str = "gradient",
        fraction: float = 0.3,
        anneal: str | None = None,
        distribution: str = "uniform",
        window: int = 1,
        every: int | None = 100,
        **timetable: Any,
    ) -> None:
        super().__init__(window=window, every=every, **timetable)
        self.grow = check_choice("PruneAndGrow.grow", grow, RULES)
        self.level = check_level("PruneAndGrow.level", level)
        pattern = pattern_of(self.level)
        if pattern is None and level != "entry":
            raise PolicyError(f"PruneAndGrow.level: expected entry, N:M or blocks, got {shown(level)}")
        self._pattern = pattern or Pattern(None, 1, 1)
        anneal = anneal or ("constant" if self.timetable.stop is None else RULES[grow])
        self.anneal = check_choice("PruneAndGrow.anneal", anneal, (*ANNEALS, "constant"))
        self.distribution = check_choice("PruneAndGrow.distribution", distribution, DISTRIBUTIONS)
        self.density = density_of_level("PruneAndGrow", density, level)
        if self._pattern.kept is not None and distribution != "uniform":
            raise PolicyError(f"PruneAndGrow.distribution: level {level!r} is uniform")
        self.fraction = check_share("PruneAndGrow.fraction", fraction)
        self.fraction_at = self._annealed()
        self.needs_gradients = grow == "gradient"

    def prepare(self) -> None:
        """Compute the initial masks."""
        super().prepare()
        self._shapes = shapes = {
            name: tuple(parameter.shape)
            for name, parameter in self.parameters.items()
            if parameter.dim() > 1 and parameter.numel()
        }
        if not shapes:
            raise PolicyError("PruneAndGrow: no parameter with two dimensions or more is left to make sparse")
        unordered = [name for name in shapes if self.parameters[name].is_complex()]
        if unordered and self.grow == "random":
            raise PolicyError(f"PruneAndGrow: {unordered[0]!r} is complex; it takes grow='gradient'")
        for name, shape in shapes.items():
            self._pattern.check(name, shape)
        self._active: dict[str, Tensor] = {}
        for name, target in self.targets(self.timetable.begins(0)).items():
            nothing = torch.zeros(shapes[name], dtype=torch.bool, device=self.parameters[name].device)
            grown = self._grown(name, self._pattern.blocks(nothing), -1, target, None)
            self._active[name] = self._pattern.spread(grown, shapes[name])
        self._first_values: dict[str, tuple[Tensor, Tensor]] = {}
        self._deviations = {
            name: float(full_tensor(self.parameters[name].detach()).double().std(correction=0))
            for name in (shapes if self.grow == "random" else ())
        }
        known = {"_active": self._active, "_deviations": dict.fromkeys(self._deviations)}
        self.remembered = {**GradientSource.remembered, **known}
        # The initial masks are those of period 0, unless it starts later than at count 0.
        self.decided = 0 if self.timetable.start == 0 else -1

    def targets(self, count: int) -> dict[str, int]:
        """Return the number of active entries (or blocks) of each sparse tensor, rounded up."""
        shares = densities(self._shapes, density_at(self.density, count), self.distribution)
        units = {name: math.prod(shape) // self._pattern.unit for name, shape in self._shapes.items()}
        return {
            name: min(math.ceil(shares[name] * number * (1.0 - ROUNDING)), number)
            for name, number in units.items()
        }

    def _annealed(self) -> Schedule:
        """Return ``f(t)``, the fraction of active entries that is replaced at a count."""
        if self.anneal == "constant":
            return Constant(self.fraction)
        times = self.timetable
        if times.stop is None:
            raise PolicyError(f"PruneAndGrow.stop: anneal={self.anneal!r} needs the count that it ends at")
        return ANNEALS[self.anneal](self.fraction, 0.0, steps=times.stop - times.start, begin=times.start)

    def gradient_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of the sparse tensors whose gradients are needed."""
        return super().gradient_names(step, epoch) & self._shapes.keys()

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the topology, after a change if one is due and its window is full."""
        if self.overdue(step, epoch):
            self._exchange(self.period(step, epoch))
            self.decide(step, epoch)
        return {name: self._active.get(name, True) for name in self.parameters}

    def apply(self) -> None:
        """Set grown entries to their initial values, and entries outside of the mask to zero."""
        for name, active in self._active.items():
            parameter = self.parameters[name].detach()
            if name in self._first_values:
                write_entries(parameter, *self._first_values[name])
            zero_outside(parameter, active)
        self._first_values = {}

    def _exchange(self, period: int) -> None:
        count = self.timetable.begins(period)
        targets, fraction = self.targets(count), self.fraction_at(count)
        sums = self.sums.get("gradient", {})
        by_sign = self.grow == "random" and self._pattern.unit == 1
        for name, active in self._active.items():
            if self.grow == "gradient" and name not in sums:
                continue
            weight = self._units(full_tensor(self.parameters[name].detach()))
            before, target = self._pattern.blocks(active), targets[name]
            kept = kept_entries(before, weight, fraction, target, by_sign=by_sign)
            gradient = None if self.grow == "random" else self._units(full_tensor(sums[name]))
            grown = self._grown(name, kept, period, target, gradient)
            self._active[name] = self._pattern.spread(kept | grown, self._shapes[name])
            if self.grow == "random":
                indices = self._pattern.spread(grown, self._shapes[name]).flatten().nonzero().flatten()
                key = derive(self.seed, period, name, "prune_and_grow", "init")
                self._first_values[name] = (indices, normal_values(key, indices, self._deviations[name]))

    def _units(self, values: Tensor) -> Tensor:
        """Return values of entries, or the mean magnitudes of blocks, as a matrix."""
        return values.flatten(1) if self._pattern.unit == 1 else self._pattern.pooled(values.abs())

    def _grown(self, name: str, kept: Tensor, period: int, target: int, gradient: Tensor | None) -> Tensor:
        """Return the mask of entries (or blocks) to grow, by the gradient or at random."""
        if gradient is None:
            key = derive(self.seed, period, name, "prune_and_grow")
            scores = words_at(key, torch.arange(kept.numel(), device=kept.device)).reshape(kept.shape)
        else:
            scores = gradient.abs()
        if self._pattern.kept is not None:
            return self._pattern.best(scores.masked_fill(kept, math.inf)) & ~kept
        return grown_entries(kept, scores, target)


# ---- one change of the topology


def kept_entries(active: Tensor, weight: Tensor, fraction: float, target: int, *, by_sign: bool) -> Tensor:
    """Return the mask of active entries that are not dropped.

    Args:
        active: The current mask.
        weight: The weights, in the same shape.
        fraction: The fraction ``ζ`` to drop (rounded down).
        target: The maximal number of active entries before the drop. Beyond it, those with the smallest
            ``|w|`` are dropped first.
        by_sign: True to drop the fraction of the smallest positive entries, and that of the largest negative
            ones, instead of those with the smallest ``|w|``.
    """
    weight = weight.flatten()
    indices = active.flatten().nonzero().flatten()
    if len(indices) > target:
        indices = indices[highest(weight[indices].abs(), target)]
    parts = [indices]
    if by_sign:
        negative = weight[indices] < 0
        parts = [indices[negative], indices[~negative]]
    kept = torch.zeros_like(active).flatten()
    for part in parts:
        stay = highest(weight[part].abs(), len(part) - int(len(part) * fraction))
        kept[part[stay]] = True
    return kept.reshape(active.shape)


def grown_entries(kept: Tensor, scores: Tensor, target: int) -> Tensor:
    """Return the mask of entries to grow: those with the highest scores that are not kept.

    Args:
        kept: The mask of active entries.
        scores: Numbers of at least 0, in the same shape.
        target: The number of active entries after growing, if there are so many.
    """
    wanted = target - int(torch.count_nonzero(kept))
    return highest(scores.masked_fill(kept, -1.0), wanted) & ~kept


def normal_values(key: int, indices: Tensor, deviation: float) -> Tensor:
    """Return normal values with mean 0 as a function of the key and index, equal on all devices.

    Args:
        key: The 64-bit key of the random numbers.
        indices: Flat indices in ascending order.
        deviation: The standard deviation.

    Returns:
        A float64 tensor with one value per index.
    """
    # On the CPU, since erfinv differs between devices in the last bits.
    words = words_at(key, indices.cpu())
    drawn = math.sqrt(2.0) * deviation * torch.erfinv((2.0 * words + 1.0) / 2.0**32 - 1.0)
    return drawn.to(indices.device)
