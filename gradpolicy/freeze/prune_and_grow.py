"""Sparse training with a topology that changes: SET and RigL. Entries outside the mask are zero."""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.errors import PolicyError, unknown
from gradpolicy.freeze.hashing import derive, uniform
from gradpolicy.freeze.mask import Mask
from gradpolicy.freeze.schedule import Schedule, as_schedule, check_share, density_at
from gradpolicy.freeze.select import highest
from gradpolicy.freeze.sharding import like, local, whole
from gradpolicy.freeze.sparsity import DISTRIBUTIONS, densities
from gradpolicy.freeze.window import GradientSource
from gradpolicy.where import match_names

GROWTHS = ("gradient", "random")
ANNEALS = ("cosine", "constant", "linear")


class PruneAndGrow(GradientSource):
    """Trains a sparse network: now and then the smallest weights go, and as many others come.

    At first each weight tensor has a random mask of its density. At each change, of its ``n`` active entries

    1. ``⌊n · f(t)⌋`` are dropped: those with the smallest ``|w|``;
    2. as many are grown among all that are now inactive, those just dropped among them: with
       ``grow="gradient"`` (RigL) those with the largest ``|Σ g|`` of the dense gradient over the ``window``
       steps before, with ``grow="random"`` (SET) any.

    A grown entry starts at zero; one that was dropped and grown in the same change keeps its value. Entries
    outside the mask are held at zero. ``f(t) = ½ α (1 + cos(π t / T))`` for ``anneal="cosine"``, with ``t``
    counted from ``start`` and ``T`` = ``stop − start``. Use ``frozen_state="zero"`` or ``"drop"``: grown
    entries then begin with empty moments.

    Tensors with one dimension (biases, norms) stay dense.

    Args:
        density: The share of entries that is active; a number or a schedule of the count.
        grow: ``"gradient"`` (RigL) or ``"random"`` (SET).
        fraction: ``α``, the share that is exchanged at first.
        anneal: How the share decreases: ``"cosine"``, ``"linear"`` or ``"constant"``; None: ``"cosine"``
            where there is a ``stop``, ``"constant"`` where there is none.
        distribution: ``"uniform"`` (the same density everywhere) or ``"erk"`` (Erdős–Rényi–kernel: small
            tensors are denser; the density of the whole is met).
        dense: Globs of parameters that stay dense, such as the first layer.
        window: Over how many steps the gradients are summed.
        every: After how many steps (or epochs) the topology changes.
        **timetable: ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`. ``stop`` ends the
            exchange; RigL puts it at 75 % of the training. Cosine and linear annealing need it.

    Raises:
        PolicyError: For an unknown option, a missing ``stop``, or if there is nothing to make sparse.

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
        density: float | Schedule = 0.1,
        *,
        grow: str = "gradient",
        fraction: float = 0.3,
        anneal: str | None = None,
        distribution: str = "uniform",
        dense: str | Iterable[str] | None = None,
        window: int | None = 1,
        every: int | None = 100,
        **timetable: Any,
    ) -> None:
        super().__init__(window=window, every=every, **timetable)
        self.anneal = anneal or ("constant" if self.stop is None else "cosine")
        for key, value, valid in (
            ("grow", grow, GROWTHS),
            ("anneal", self.anneal, ANNEALS),
            ("distribution", distribution, DISTRIBUTIONS),
        ):
            if value not in valid:
                raise unknown(key, str(value), valid, key=f"PruneAndGrow.{key}")
        if self.anneal != "constant" and self.stop is None:
            raise PolicyError(f"PruneAndGrow.stop: anneal={anneal!r} needs the count that it ends at")
        self.density = as_schedule(density)
        self.grow, self.distribution, self.dense = grow, distribution, dense
        self.fraction = check_share("PruneAndGrow.fraction", fraction)
        self.needs_gradients = grow == "gradient"
        self._active: dict[str, Tensor] = {}

    def prepare(self) -> None:
        """Draws the first masks."""
        super().prepare()
        dense = set() if self.dense is None else set(match_names(self.dense, self.parameters, "parameter"))
        shapes = {
            name: tuple(parameter.shape)
            for name, parameter in self.parameters.items()
            if parameter.dim() > 1 and name not in dense
        }
        if not shapes:
            raise PolicyError("PruneAndGrow: no parameter with two dimensions or more is left to make sparse")
        self._shapes = shapes
        targets = self.targets(self.changed_at(0))
        self._active = {
            name: highest(self._random_scores(name, -1).reshape(shape), targets[name])
            for name, shape in shapes.items()
        }
        # At count 0 the first masks are the draw itself; a later start is the first exchange.
        self.decided = 0 if self.start == 0 else -1

    def targets(self, count: int) -> dict[str, int]:
        """How many entries of each sparse tensor are active at a count."""
        shares = densities(self._shapes, density_at(self.density, count), self.distribution)
        return {
            name: math.prod(shape) - int(round((1.0 - shares[name]) * math.prod(shape), 6))
            for name, shape in self._shapes.items()
        }

    def fraction_at(self, count: int) -> float:
        """``f(t)``: the share of active entries that is exchanged at a count."""
        if self.anneal == "constant" or self.stop is None:
            return self.fraction
        passed = min(max((count - self.start) / (self.stop - self.start), 0.0), 1.0)
        left = 1.0 - passed if self.anneal == "linear" else 0.5 * (1.0 + math.cos(math.pi * passed))
        return self.fraction * left

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """The topology; a new one where it is due and the gradients are there."""
        period = self.period(step, epoch)
        if self.overdue(step, epoch):
            self._exchange(period)
            self.decided = period
            self.gathered.clear()
        return {name: self._active.get(name, True) for name in self.parameters}

    def apply(self) -> None:
        """Puts entries outside the mask to zero."""
        for name, active in self._active.items():
            parameter = self.parameters[name].detach()
            local(parameter).masked_fill_(local(like(~active, parameter)), 0.0)

    def state_dict(self) -> dict[str, Any]:
        """The topology, and the gradients gathered so far."""
        return {**super().state_dict(), "active": dict(self._active)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up where :meth:`state_dict` left off."""
        super().load_state_dict(state)
        self._active = {
            name: active.to(self.parameters[name].device) for name, active in state["active"].items()
        }

    def describe(self) -> dict[str, Any]:
        """Density, growth and share of exchange."""
        shown = ("density", "grow", "fraction", "anneal", "distribution")
        return {key: getattr(self, key) for key in shown}

    def _exchange(self, period: int) -> None:
        count = self.changed_at(period)
        targets, fraction = self.targets(count), self.fraction_at(count)
        for name, active in self._active.items():
            weight = whole(self.parameters[name].detach())
            if self.grow == "random":
                growth = self._random_scores(name, period).reshape(weight.shape)
            elif name in self.gathered.sums:
                growth = whole(self.gathered.sums[name]).abs()
            else:
                continue
            self._active[name] = exchange(active, weight.abs(), growth, fraction, targets[name])

    def _random_scores(self, name: str, period: int) -> Tensor:
        parameter = self.parameters[name]
        key = derive(self.seed, period, name, "prune_and_grow")
        return uniform(key, parameter.numel(), parameter.device).double()


def exchange(active: Tensor, kept_by: Tensor, grown_by: Tensor, fraction: float, target: int) -> Tensor:
    """Drops the active entries that score lowest, and grows inactive ones that score highest.

    Args:
        active: The mask so far.
        kept_by: Scores of active entries; the lowest are dropped.
        grown_by: Scores of inactive entries, those just dropped among them; the highest are grown.
        fraction: The share of active entries to drop (rounded down).
        target: How many entries are active afterwards.

    Returns:
        The new mask, with exactly ``target`` active entries.
    """
    count = min(int(active.sum()), target)
    kept_count = count - int(count * fraction)
    lowest = torch.full_like(kept_by, -math.inf)
    kept = highest(torch.where(active, kept_by, lowest), kept_count) & active
    lowest = torch.full_like(grown_by, -math.inf)
    grown = highest(torch.where(kept, lowest, grown_by), target - kept_count)
    return kept | grown
