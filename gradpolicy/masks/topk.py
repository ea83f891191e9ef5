"""Masks of the entries that score highest, by gradients or weights."""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_choice, check_flag
from gradpolicy.errors import PolicyError
from gradpolicy.masks.gradient_source import GradientSource, wide
from gradpolicy.masks.selection import (
    Density,
    as_density,
    density_at,
    highest,
    highest_together,
    kept_count,
)
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.seeded import LEVELS
from gradpolicy.tensors.sharding import full_tensor, local_shard, shard_like

SCORES = ("gradient", "weight", "fisher", "movement", "change")
SCOPES = ("global", "tensor")
BEFORE = ("train", "freeze")


class TopK(GradientSource):
    """The share ``density`` of entries (rows, tensors) with the highest scores trains.

    ============  ==============================================  ==========================================
    ``by``        score of an entry                               known as
    ============  ==============================================  ==========================================
    gradient      ``|Σ g|``                                       gradient magnitude
    weight        ``|w|``                                         magnitude
    fisher        ``Σ g²`` (diagonal of the empirical Fisher)     Child-Tuning_D, FISH mask
    movement      ``−Σ w · g``                                    movement pruning
    change        ``|w − w₀|``, w₀ from the start of training     lottery-ticket sparse fine-tuning
    ============  ==============================================  ==========================================

    Sums run over the ``window`` effective steps before a choice; the score of a row or tensor is the mean of
    its entries'. ``k = n − ⌈(1 − p)(n − 1)⌉`` of ``n`` are chosen (``p · n`` where that is whole), of equal
    scores the first.

    Args:
        density: The share that trains; a number or a schedule of the count.
        by: The score, as above.
        scope: ``"global"``: the highest of all parameters together; ``"tensor"``: of each by itself.
        level: What is chosen: ``"entry"``, ``"row"`` or ``"tensor"``.
        window: How many steps of gradients are summed.
        before: What happens until there are scores: ``"train"`` (everything) or ``"freeze"`` (nothing moves
            while gradients are gathered, as Child-Tuning_D and FISH do it).
        rewind: With ``by="change"``: put the weights back to w₀ when the entries are first chosen, and begin
            with empty optimizer state, as lottery-ticket fine-tuning does.
        every: After how many steps (or epochs) entries are chosen anew; None: once.
        **timetable: ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`. With ``by="change"``,
            ``start`` says how long the weights move before the choice.

    Raises:
        PolicyError: For an unknown option.

    Source: Xu et al. 2021, arXiv:2109.05687 (Child-Tuning_D); Sung, Nair, Raffel 2021, arXiv:2111.09839
    (FISH); Sanh, Wolf, Rush 2020, arXiv:2005.07683 (movement); Ansell et al. 2022, arXiv:2110.07560 (LT-SFT).

    Example:
        >>> import torch
        >>> source = TopK(density=0.5, by="weight")
        >>> source.setup({"w": torch.tensor([0.1, -3.0, 0.2, 2.0])}, seed=0)
        >>> source.masks(step=0, epoch=0)["w"].tolist()
        [False, True, False, True]
    """

    def __init__(
        self,
        density: float | Density = 0.1,
        *,
        by: str = "gradient",
        scope: str = "global",
        level: str = "entry",
        window: int | None = 1,
        before: str = "train",
        rewind: bool = False,
        every: int | None = None,
        **timetable: Any,
    ) -> None:
        super().__init__(window=window, every=every, **timetable)
        self.by = check_choice("TopK.by", by, SCORES)
        self.scope = check_choice("TopK.scope", scope, SCOPES)
        self.level = check_choice("TopK.level", level, LEVELS)
        self.before = check_choice("TopK.before", before, BEFORE)
        self.rewind = check_flag("TopK.rewind", rewind)
        if rewind and by != "change":
            raise PolicyError("TopK.rewind: goes with by='change' only")
        if by == "change" and self.timetable.start == 0:
            raise PolicyError(
                "TopK.start: by='change' needs steps in which the weights change; give start above 0"
            )
        self.density = as_density("TopK.density", density)
        self.needs_gradients = by not in ("weight", "change")
        self._masks: dict[str, Mask] = {}
        self._initial: dict[str, Tensor] = {}
        self._to_rewind = False

    def prepare(self) -> None:
        """Keep the weights that changes are measured from."""
        super().prepare()
        self._masks = dict.fromkeys(self.parameters, self.before == "train")
        self._initial = {}
        self._to_rewind = False
        if self.by == "change":
            self._initial = {name: p.detach().clone() for name, p in self.parameters.items()}

    def statistic(self, weight: Tensor, gradient: Tensor) -> Tensor:
        """Return what is summed over the window."""
        if self.by == "fisher":
            return _real_product(gradient, gradient)
        return -_real_product(weight, gradient) if self.by == "movement" else gradient

    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the last choice, or a new one if it is due and the scores are there."""
        if self.overdue(step, epoch):
            self._to_rewind = self.rewind and self.decided < 0
            changed = self.timetable.begins(self.period(step, epoch))
            self._masks = self._choose(density_at(self.density, changed))
            self.decide(step, epoch)
        return self._masks

    @property
    def resets_state(self) -> bool:
        """Return True if the weights go back to w₀, where their optimizer state is reset."""
        return self._to_rewind

    def apply(self) -> None:
        """Put the weights back to w₀, once, if ``rewind`` is on."""
        if self._to_rewind:
            for name, parameter in self.parameters.items():
                local_shard(parameter.detach()).copy_(local_shard(self._initial[name]))
            self._to_rewind = False

    def scores(self) -> dict[str, Tensor]:
        """Return the score of each entry, row or tensor; −∞ where there was no gradient."""
        scores = {name: full_tensor(self._score(name, p)) for name, p in self.parameters.items()}
        if self.level == "entry":
            return scores
        return {name: _mean_over(score, self.level) for name, score in scores.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return the masks, the gradients gathered so far, and w₀ where it is needed."""
        initial = {name: full_tensor(weight) for name, weight in self._initial.items()}
        return {**super().state_dict(), "masks": dict(self._masks), "initial": initial}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned."""
        super().load_state_dict(state)
        self._masks = {
            name: mask.to(self.parameters[name].device) if isinstance(mask, Tensor) else mask
            for name, mask in state["masks"].items()
        }
        self._initial = {
            name: shard_like(weight, self.parameters[name]) for name, weight in state["initial"].items()
        }

    def _score(self, name: str, parameter: Tensor) -> Tensor:
        weight = wide(parameter.detach())
        if self.by == "weight":
            return weight.abs()
        if self.by == "change":
            return (weight - wide(self._initial[name])).abs()
        gathered = self.sums.get(name)
        if gathered is None:
            return torch.full_like(weight.real, -math.inf)
        return gathered.abs() if self.by == "gradient" else gathered

    def _choose(self, density: float) -> dict[str, Mask]:
        scores = self.scores()
        if self.scope == "global":
            total = sum(score.numel() for score in scores.values())
            chosen = highest_together(scores, kept_count(density, total))
        else:
            chosen = {name: highest(s, kept_count(density, s.numel())) for name, s in scores.items()}
        if self.level == "tensor":
            return {name: bool(mask) for name, mask in chosen.items()}
        return dict(chosen)


def _real_product(first: Tensor, second: Tensor) -> Tensor:
    """Return the product; of complex numbers the sum of the products of their parts."""
    return (first * second.conj()).real if first.is_complex() else first * second


def _mean_over(score: Tensor, level: str) -> Tensor:
    """Return the mean score of each row, ``(n, 1, …)``, or of the tensor, ``(1, 1, …)``."""
    first = 1 if level == "row" else 0
    dims = tuple(range(first, score.dim()))
    return score.mean(dim=dims, keepdim=True) if dims else score
