"""Phases: a list of what trains, each with an end of its own."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_choice, check_flag, check_number, check_whole
from gradpolicy.errors import PolicyError, nearest, shortened, shown, under, unknown, warn_user
from gradpolicy.masks.base import Layer
from gradpolicy.masks.layers import LayerSource
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import full_tensor, local_shard, mean_of_ranks, shard_like
from gradpolicy.when import Timetable
from gradpolicy.where import as_patterns, match_names

COUNTS = ("steps", "epochs", "epoch")
METRIC = ("metric", "patience", "min_delta", "mode")


@dataclass(frozen=True)
class Phase:
    """A phase as it is written: what trains, until when, and how.

    Attributes:
        params: Globs of the parameters that train.
        limits: Counts that end it: of ``steps`` or ``epochs`` since it began, the ``epoch`` of the training.
        metric: The metric that ends it; None for none.
        patience: How many reports in turn may bring no improvement; the last of them ends the phase.
        min_delta: By how much a metric must be better to count as an improvement.
        mode: Whether the least (``"min"``) or the greatest (``"max"``) is best.
        best: True to put the weights of the best report back when the phase ends.
        settings: Of the optimizer while it lasts, by glob; the first that matches a parameter counts.
    """

    params: tuple[str, ...]
    limits: Mapping[str, int] = field(default_factory=dict)
    metric: str | None = None
    patience: int = 3
    min_delta: float = 0.0
    mode: str = "min"
    best: bool = False
    settings: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @classmethod
    def read(cls, written: object) -> "Phase":
        """Return a phase from the dict that a person wrote.

        Raises:
            PolicyError: For an unknown key or an impossible value.
        """
        if not isinstance(written, Mapping):
            raise PolicyError(f"must be a dict with params, and until, got {shown(written)}")
        keys = ("params", "until", "best")
        general = {key: value for key, value in written.items() if key not in keys}
        _check_keys([key for key, value in general.items() if isinstance(value, Mapping)], keys, "key")
        until = {} if written.get("until") is None else written["until"]
        if not isinstance(until, Mapping):
            raise PolicyError(f"until: must be a dict such as {{'epochs': 1}}, got {shown(until)}")
        _check_keys(until, (*COUNTS, *METRIC), "key", "until")
        given, metric = written.get("params"), until.get("metric")
        params = as_patterns(list(given) if isinstance(given, Mapping) else given)
        if not params or not all(isinstance(pattern, str) for pattern in params):
            raise PolicyError(f"params: must be globs of what trains, got {shown(written.get('params'))}")
        if metric is None and until.keys() & METRIC:
            raise PolicyError(f"until.{min(until.keys() & METRIC)}: goes with until.metric, which is missing")
        if metric is not None and not isinstance(metric, str):
            raise PolicyError(f"until.metric: must be the name of a metric, got {shown(metric)}")
        best = check_flag("best", written.get("best", False))
        if best and metric is None:
            raise PolicyError("best: needs until.metric, which says what is best")
        settings = {}
        for pattern, own in given.items() if isinstance(given, Mapping) else [("*", None)]:
            with under(f"params: {shown(pattern)}") if own else nullcontext():
                settings[pattern] = _settings(general, own)
        return cls(
            params,
            {key: check_whole(f"until.{key}", until[key], least=1) for key in COUNTS if key in until},
            metric,
            check_whole("until.patience", until.get("patience", 3), least=1),
            check_number("until.min_delta", until.get("min_delta", 0.0)),
            check_choice("until.mode", until.get("mode", "min"), ("min", "max")),
            best,
            settings,
        )

    def is_better(self, value: float, than: float, by: float = 0.0) -> bool:
        """Return True if a value of the metric is better than another; NaN never is."""
        return value < than - by if self.mode == "min" else value > than + by

    @property
    def worst(self) -> float:
        """The value than which every number is better."""
        return math.inf if self.mode == "min" else -math.inf


class Phases(LayerSource):
    """Trains in phases, each with its own parameters, until its end is reached.

    A phase is a dict:

    - ``params``: globs of what trains; all else is frozen. Phases may overlap, and freeze again what trained.
    - ``until``: what ends it, whichever comes first. ``steps`` or ``epochs`` since it began; ``epoch``,
      a count of the whole training; ``metric``, which ends it after ``patience`` reports (3) in turn without
      an improvement by more than ``min_delta`` (0). ``mode`` says if ``"min"`` or ``"max"`` is best. Only the
      last phase may do without.
    - ``best``: True puts the weights of the best report back when the phase, or the training, ends. State of
      the optimizer and buffers stay.
    - ``lr`` and any other setting of the optimizer (``weight_decay``, ``betas`` …): what the parameters of
      the phase have while it lasts. A learning rate takes the place of the optimizer's own: schedulers scale
      it. A function of the steps since the phase began, such as a schedule of :mod:`gradpolicy.schedules`,
      gives the rate itself. In ``params``, a dict from globs to settings tells parameters apart.

    Lightning's callback reports what was logged at the end of each validation, Hugging Face's what was
    evaluated; in a loop of your own call :meth:`report`. Ranks decide by the mean of their values.

    A last phase with an end stops Lightning's training there.

    Args:
        phases: The phases in their order.
        **wrong: Any other argument is refused: phases say themselves when masks change.

    Attributes:
        phase: The index of the phase that holds.

    Raises:
        PolicyError: For an unknown key or an impossible value, a phase without an end before the last; when
            the run starts, if a glob matches nothing; if a metric was not logged.

    Example:
        >>> import torch
        >>> source = Phases([{"params": "head.*", "until": {"steps": 2}}, {"params": "*"}])
        >>> source.setup({name: torch.zeros(2) for name in ("trunk.weight", "head.weight")}, seed=0)
        >>> [source.masks(step, epoch=0)["trunk.weight"] for step in range(4)]
        [False, False, True, True]
    """

    def __init__(self, phases: Sequence[Mapping[str, Any]], **wrong: Any) -> None:
        super().__init__(**wrong)
        if wrong:
            raise PolicyError(f"Phases.{min(wrong)}: means nothing here; a phase says what ends it in until")
        if isinstance(phases, str | Mapping) or not isinstance(phases, Iterable) or not list(phases):
            raise PolicyError(f"Phases.phases: must be a list of phases, got {shown(phases)}")
        self.phases = [dict(each) if isinstance(each, Mapping) else each for each in phases]
        self._read = []
        for place, written in enumerate(self.phases):
            with under(f"Phases.phases[{place}]"):
                self._read.append(Phase.read(written))
                if not self._ends(-1) and place + 1 < len(self.phases):
                    raise PolicyError(
                        "until: is missing, so that the phases after it are never reached; name steps, "
                        "epochs or a metric"
                    )
        self._settings: list[dict[str, Mapping[str, Any]]] = []
        self.setting_names = {name for each in self._read for own in each.settings.values() for name in own}
        counts_epochs = any(each.limits.keys() - {"steps"} for each in self._read)
        self.timetable = Timetable(unit="epoch" if counts_epochs else "step", every=1)
        self._reset()

    def _reset(self) -> None:
        self.phase = 0
        # The step and epoch at which the phase began, and whether a later step has found it over.
        self._began: tuple[int, int] | None = None
        self._begin_reports()

    def _begin_reports(self) -> None:
        phase = self._read[self.phase]
        # What an improvement is measured against, the best value, and reports since the last improvement.
        self._reference = self._best = phase.worst
        self._waited = 0
        self._kept: dict[str, Tensor] = {}

    def prepare(self) -> None:
        """Find what trains in each phase, and begin with the first."""
        self.layer_groups, self._settings = [], []
        for place, phase in enumerate(self._read):
            with under(f"Phases.phases[{place}].params"):
                names = tuple(match_names(phase.params, self.parameters, "parameter"))
                self._settings.append(_by_name(phase.settings, names))
            self.layer_groups.append(Layer(shortened(list(phase.params), most=2), names, True))
        self._reset()

    def _ends(self, place: int) -> bool:
        return bool(self._read[place].limits or self._read[place].metric)

    @torch.no_grad()
    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return one flag for each parameter; begin the next phase where one is over."""
        self._began = self._began or (step, epoch)
        while self.overdue(step, epoch):
            self._put_back()
            self.phase, self._began = self.phase + 1, (step, epoch)
            self._begin_reports()
        return super().masks(step, epoch)

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the parameters that do not train in this phase."""
        return set(self.parameters).difference(self.layer_groups[self.phase].parameters)

    def settings(self, step: int, epoch: int) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings of the phase, functions of its steps as they are now."""
        if not self._settings[self.phase]:
            return {}
        passed = 0 if self._began is None else step - self._began[0]
        return {
            name: {key: value(passed) if callable(value) else value for key, value in own.items()}
            for name, own in self._settings[self.phase].items()
        }

    def overdue(self, step: int, epoch: int) -> bool:
        """Return True if the next phase is to begin."""
        return self.phase + 1 < len(self._read) and self._is_over(step, epoch)

    def is_finished(self, step: int, epoch: int) -> bool:
        """Return True if the last phase has reached its end."""
        return self.phase + 1 == len(self._read) and self._is_over(step, epoch)

    def _is_over(self, step: int, epoch: int) -> bool:
        if self._began is None:
            return False
        phase, (first_step, first_epoch) = self._read[self.phase], self._began
        counts = {"steps": step - first_step, "epochs": epoch - first_epoch, "epoch": epoch}
        stalled = phase.metric is not None and self._waited >= phase.patience
        return stalled or any(counts[key] >= limit for key, limit in phase.limits.items())

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Take what was measured by a validation, with the weights as they are now.

        Args:
            metrics: Numbers by name; every rank reports.

        Raises:
            PolicyError: If the metric of this phase is not among them.
        """
        phase = self._read[self.phase]
        if phase.metric is None or self._began is None:
            return
        if phase.metric not in metrics:
            raise PolicyError(
                f"Phases.phases[{self.phase}].until.metric: {shown(phase.metric)} was not logged; "
                f"{nearest(phase.metric, map(str, metrics))}"
            )
        value = mean_of_ranks(float(metrics[phase.metric]))
        if phase.is_better(value, self._best):
            self._best = value
            if phase.best:
                own = self.layer_groups[self.phase].parameters
                self._kept = {name: self.parameters[name].detach().clone() for name in own}
        improved = phase.is_better(value, self._reference, phase.min_delta)
        self._reference = value if improved else self._reference
        self._waited = 0 if improved else self._waited + 1

    def finish(self) -> None:
        """Put the best weights of the last phase back; warn of phases that never began."""
        self._put_back()
        if self._began is not None and self.phase + 1 < len(self._read):
            warn_user(
                f"Phases: the training ended in phase {self.phase} (params "
                f"{', '.join(self._read[self.phase].params)}); {len(self._read) - 1 - self.phase} more never "
                "began"
            )

    @torch.no_grad()
    def _put_back(self) -> None:
        kept, self._kept = self._kept, {}
        for name, best in kept.items():
            local_shard(self.parameters[name].detach()).copy_(local_shard(best))

    def may_freeze(self) -> set[str]:
        """Return the parameters that do not train in all phases."""
        return set().union(*(self.parameters.keys() - set(each.parameters) for each in self.layer_groups))

    def state_dict(self) -> dict[str, Any]:
        """Return the phase, when it began, what was reported, and the best weights."""
        return {
            "phase": self.phase,
            "began": None if self._began is None else list(self._began),
            "reports": [self._reference, self._best, self._waited],
            "kept": {name: full_tensor(tensor) for name, tensor in self._kept.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned.

        Raises:
            PolicyError: If there are fewer phases now.
        """
        if state["phase"] >= len(self._read):
            raise PolicyError(
                f"Phases.phases: the checkpoint is of phase {state['phase']}, and there are {len(self._read)}"
            )
        self.phase = state["phase"]
        self._began = None if state["began"] is None else tuple(state["began"])
        self._reference, self._best, self._waited = state["reports"]
        self._kept = {name: shard_like(each, self.parameters[name]) for name, each in state["kept"].items()}

    def describe(self) -> dict[str, Any]:
        """Return the number of phases; the plan names what each of them trains."""
        return {"phases": len(self.phases)}

    def __repr__(self) -> str:
        return f"Phases({self.phases!r})"


def _settings(general: Mapping[str, Any], own: object = None) -> dict[str, Any]:
    """Return settings of the optimizer: a number as a rate that schedulers scale, a function as the rate."""
    if not isinstance(own, Mapping | None):
        raise PolicyError(f"must be a dict of settings such as {{'lr': 1e-4}}, got {shown(own)}")
    both = {**general, **(own or {})}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in both.items()}
    rate = found.pop("lr", None)
    if callable(rate):
        found["rate"] = rate
    elif "lr" in both:
        found["initial_lr"] = check_number("lr", rate)
    return found


def _by_name(settings: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each parameter: those of the first glob that matches it."""
    found: dict[str, Mapping[str, Any]] = {}
    for pattern, own in settings.items():
        for name in match_names((pattern,), names, "parameter"):
            found.setdefault(name, own)
    return {name: own for name, own in found.items() if own}


def _check_keys(written: Iterable[str], known: Sequence[str], kind: str, key: str | None = None) -> None:
    for name in written:
        if name not in known:
            raise unknown(kind, str(name), known, key=key)
