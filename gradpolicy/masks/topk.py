"""Masks of the entries with the highest scores."""

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from gradpolicy.checks import check_choice, check_flag
from gradpolicy.errors import PolicyError, shown, under
from gradpolicy.masks.gradient_source import STATISTICS, GradientSource, wide
from gradpolicy.masks.layers import Groups, layers_of, read_groups
from gradpolicy.masks.scores import GATHERED, SCORES, as_score, follow_inputs
from gradpolicy.masks.selection import (
    Density,
    density_at,
    density_of_level,
    highest,
    kept_count,
    marks_of_highest,
)
from gradpolicy.schedules import Constant
from gradpolicy.tensors.mask import Mask, pack, unpack
from gradpolicy.tensors.pattern import pattern_of
from gradpolicy.tensors.seeded import check_level
from gradpolicy.tensors.sharding import full_tensor, sum_over_processes

SCOPES = ("model", "tensor", "row")
BEFORE = ("train", "freeze")


class TopK(GradientSource):
    """Trains the fraction ``density`` of entries (rows, tensors) with the highest scores.

    ============  ==============================================  ==========================================
    ``by``        score of an entry                               known as
    ============  ==============================================  ==========================================
    gradient      ``|Σ g|``                                       gradient magnitude
    magnitude     ``|w|``                                         also ``weight``
    fisher        ``Σ g²`` (diagonal of the empirical Fisher)     Child-Tuning_D
    movement      ``−Σ w · g``                                    movement pruning
    change        ``|w − w₀|``, w₀ at the start of training       lottery-ticket sparse fine-tuning
    snip          ``|Σ w · g|``                                   SNIP
    wanda         ``|w| · ‖x‖₂`` with the layer's input x         Wanda
    lift          ``|w|`` after a low-rank approximation          LIFT
    ============  ==============================================  ==========================================

    ``by`` may also be ``gradpolicy.masks.scores.LIFT(rank)``, or a function of a score's inputs,
    ``lambda weight, gradient: …``, or its dotted path: see :class:`~gradpolicy.masks.scores.Score`.

    Sums are over the ``window`` effective steps before a choice. The score of a row or tensor is the mean of
    its entries' scores. ``k = n − ⌈(1 − p)(n − 1)⌉`` of ``n`` are chosen (``p · n`` if that is an
    integer), and the first ones of equal scores.

    Args:
        density: The fraction that trains; a number or a schedule of the count. None: 0.1, or that of the
            level.
        by: The score, as above.
        largest: True for the highest scores, False for the lowest.
        within: The entries that are compared: ``"model"``: those of all parameters; ``"tensor"``: those of
            each parameter; ``"row"``: those of each row; groups of globs: those of each group's parameters.
        level: The unit of choice: ``"entry"``, ``"row"``, ``"tensor"``, ``"2:4"`` (the best 2 of every 4
            entries of a row) or blocks, ``"16x16"``.
        window: The number of steps whose gradients are summed.
        before: Before the first choice, ``"train"`` trains all entries, and ``"freeze"`` none, as in
            Child-Tuning_D and FISH.
        every: The number of steps (or epochs) between choices; None: one choice.
        **timetable: ``unit``, ``start``, ``stop``, ``seed``: see :class:`MaskSource`. With ``by="change"``,
            ``start`` is the number of steps before the choice, in which the weights change.

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

    keeps_masks = True
    remembered = {**GradientSource.remembered, "_masks": {}, "_next": {}, "_initial": {}, "_squares": {}}

    def __init__(
        self,
        density: float | Density | None = None,
        *,
        by: str | Callable[..., Tensor] = "gradient",
        largest: bool = True,
        within: str | Groups = "model",
        level: str = "entry",
        window: int = 1,
        before: str = "train",
        every: int | None = None,
        **timetable: Any,
    ) -> None:
        super().__init__(window=window, every=every, **timetable)
        self.score = as_score("TopK.by", by, SCORES)
        self.by = self.score.name
        self.largest = check_flag("TopK.largest", largest)
        self.groups = None if isinstance(within, str) else read_groups("TopK.within", within)
        self.within = within if self.groups else check_choice("TopK.within", within, SCOPES)
        self.level = check_level("TopK.level", level)
        if within == "row" and level != "entry":
            raise PolicyError("TopK.within: 'row' goes with level='entry'")
        self._pattern = pattern_of(level)
        # True if entries are chosen, including N of every M entries.
        self._by_entry = level == "entry" or (self._pattern is not None and self._pattern.kept is not None)
        self._in_rows = self._by_entry and (level != "entry" or within == "row")
        self.before = check_choice("TopK.before", before, BEFORE)
        asks = self.score.asks
        if by == "change" and self.timetable.start == 0:
            raise PolicyError(
                "TopK.start: by='change' needs steps in which the weights change; give start above 0"
            )
        self.density = density_of_level("TopK", density, level)
        self.statistics = [each for each in asks if each in STATISTICS]
        self.needs_gradients = any(each in GATHERED for each in asks)
        self._hooks: list[RemovableHandle] = []

    def prepare(self) -> None:
        """Copy the initial weights, and register hooks on layers, if the score needs them."""
        super().prepare()
        self._masks: dict[str, Mask] = dict.fromkeys(self.parameters, self.before == "train")
        # The marks of the next choice, as bits, if it is already made.
        self._next: dict[str, Tensor] = {}
        if self._pattern is not None:
            for name, parameter in self.parameters.items():
                self._pattern.check(name, tuple(parameter.shape))
        self._scopes()
        compared = self.parameters if "initial" in self.score.asks else {}
        self._initial = {name: parameter.detach().clone() for name, parameter in compared.items()}
        self.release()
        # The sums of squares of the input features of layers, by weight.
        self._squares: dict[str, Tensor] = {}
        if "activation_norm" in self.score.asks:
            if self.model is None:
                raise PolicyError(f"TopK.by: {self.by} needs the model; use the source in a policy")
            self._hooks = follow_inputs(self.model, self.parameters, lambda: self.gathers, self._add)

    def release(self) -> None:
        """Remove the hooks from the layers."""
        while self._hooks:
            self._hooks.pop().remove()

    def _add(self, name: str, squares: Tensor) -> None:
        self._squares[name] = self._squares[name] + squares if name in self._squares else squares

    @torch.no_grad()
    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return the last choice, or a new one if one is due and its window is full."""
        if self.overdue(step, epoch):
            changed = self.timetable.begins(self.period(step, epoch))
            marks = self._next or self._choose(density_at(self.density, changed))
            self._masks = {name: self._as_mask(name, marks.pop(name)) for name in self.parameters}
            self.decide(step, epoch)
        return self._masks

    @torch.no_grad()
    def observe(self, gradients: Mapping[str, Tensor]) -> None:
        """Add the gradients of an effective step, or choose by them at once, if they fill a window.

        The choice then needs no copy of the gradients. It sees weights as they are before the update.
        """
        a_window = self.window == 1 and self.timetable.unit == "step"
        complete = a_window and gradients.keys() == self.parameters.keys()
        self.keeps_gradients = not (complete and isinstance(self.density, Constant))
        super().observe(gradients)
        if isinstance(self.density, Constant) and not self.keeps_gradients:
            self._next = self._choose(self.density.value)
            self.sums, self.steps = {}, 1

    def describe(self) -> dict[str, Any]:
        """Return the arguments, without the default of ``largest``."""
        described = super().describe()
        return {key: value for key, value in described.items() if (key, value) != ("largest", True)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`."""
        super().load_state_dict(state)
        # Never sharded, since each process has the sums of its own samples.
        squares = state["squares"].items()
        self._squares = {name: each.to(self.parameters[name].device) for name, each in squares}

    def _choose(self, density: float) -> dict[str, Tensor]:
        """Return the marks of the chosen units of each parameter as bits."""
        if self._squares:
            squares, self._squares = self._squares, {}
            norms = {name: sum_over_processes(each).sqrt() for name, each in squares.items()}
            self.sums["activation_norm"] = norms
        chosen: dict[str, Tensor] = {}
        for names in self._scopes():
            for name, marks in self._marks(names, density):
                chosen[name] = pack(marks)
                # Free the memory of sums that are no longer needed.
                for sums in self.sums.values():
                    sums.pop(name, None)
        return chosen

    def _marks(self, names: Sequence[str], density: float) -> Iterator[tuple[str, Tensor]]:
        """Yield the marks of parameters whose units, or those of their rows, are compared with each other."""
        scores = {name: functools.partial(self._units, name) for name in names}
        if self._in_rows:
            for name in names:
                yield name, self._best_of_rows(scores[name](), density)
        elif len(names) == 1:
            found = scores[names[0]]()
            yield names[0], highest(found, kept_count(density, found.numel()))
        else:
            total = sum(math.prod(self._shape(name)) for name in names)
            doubles = {torch.float64, torch.complex128} & {self.parameters[name].dtype for name in names}
            dtype = torch.float64 if doubles else torch.float32
            yield from marks_of_highest(scores, kept_count(density, total), dtype)

    def _scopes(self) -> list[list[str]]:
        """Return the names of the parameters that are compared with each other."""
        if self.groups is None:
            return [list(self.parameters)] if self.within == "model" else [[name] for name in self.parameters]
        groups = layers_of("TopK.within", self.groups, self.parameters, complete=True)
        return [list(group.parameters) for group in groups]

    def _shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the units of a parameter: of its entries, rows or blocks, or of size 1."""
        shape = tuple(self.parameters[name].shape)
        if self._by_entry:
            return shape
        if self._pattern is not None:
            return shape[0] // self._pattern.rows, math.prod(shape[1:]) // self._pattern.columns
        return (*shape[:1], *(1,) * (len(shape) - 1)) if self.level == "row" else (1,) * len(shape)

    def _as_mask(self, name: str, marks: Tensor) -> Mask:
        shape, marks_shape = tuple(self.parameters[name].shape), self._shape(name)
        marks = unpack(marks, math.prod(marks_shape)).reshape(marks_shape)
        if self.level == "tensor":
            return bool(marks)
        return marks if self._pattern is None else self._pattern.spread(marks, shape)

    def _best_of_rows(self, scores: Tensor, density: float) -> Tensor:
        """Return the marks of the best N of every M entries, or of the best entries of each row."""
        if self._pattern is not None:
            return self._pattern.best(scores)
        width = math.prod(scores.shape[1:])
        kept = kept_count(density, width)
        return torch.stack([highest(row, kept) for row in scores.reshape(-1, width)])

    def _units(self, name: str) -> Tensor:
        """Return the scores of the units of a parameter."""
        scores = self._entries(name)
        if self._by_entry:
            return scores
        if self.level == "row":
            return scores.flatten(1).mean(1) if scores.dim() > 1 else scores
        if self._pattern is not None:
            return self._pattern.pooled(scores)
        return scores.mean(dtype=torch.float64).to(scores.dtype)

    def _entries(self, name: str) -> Tensor:
        """Return the scores of the entries of a parameter; −∞ without a gradient."""
        weight = full_tensor(self.parameters[name].detach())
        known = {"initial": self._initial, **self.sums}
        others = {kind: known.get(kind, {}).get(name) for kind in self.score.asks if kind != "weight"}
        found = {kind: full_tensor(each) for kind, each in others.items() if each is not None}
        if "activation_norm" in others.keys() - found:
            raise PolicyError(f"activation_norm: the layer of {shown(name)} did not run through its forward")
        if len(found) < len(others):
            return torch.full_like(wide(weight).real, -math.inf)
        inputs = {"weight": weight, **found}
        with under(f"TopK.by: {self.by} of {name}"):
            scores = self.score.formula(**{kind: wide(inputs[kind]) for kind in self.score.asks})
            if scores.shape != weight.shape or not scores.is_floating_point():
                raise PolicyError(
                    f"must give a real number for each entry, of shape {tuple(weight.shape)}; got "
                    f"{scores.dtype} of {tuple(scores.shape)}"
                )
        return scores if self.largest else -scores
