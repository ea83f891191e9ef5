"""Training in phases, each with its own parameters, settings and end."""

import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from gradpolicy.checks import check_choice, check_flag, check_integer, check_number, check_setting
from gradpolicy.errors import PolicyError, nearest, shortened, shown, under, unknown, warn_user
from gradpolicy.masks.base import Layer
from gradpolicy.masks.layer_sources import LayerSource
from gradpolicy.schedules import value_at
from gradpolicy.tensors.mask import Mask
from gradpolicy.tensors.sharding import local_shard, mean_of_ranks
from gradpolicy.when import Timetable
from gradpolicy.where import as_patterns, match_names

COUNTS = ("steps", "epochs", "epoch")
METRIC = ("metric", "patience", "min_delta", "mode")


@dataclass(frozen=True)
class Phase:
    """The definition of a phase.

    Attributes:
        params: Globs of the parameters that train.
        limits: Counts that end the phase: ``steps`` or ``epochs`` since its start, or the ``epoch`` of the
            training.
        metric: The metric that ends the phase; None if there is none.
        patience: The number of consecutive reports without an improvement that ends the phase.
        min_delta: The minimal change of the metric that counts as an improvement.
        mode: ``"min"`` if lower values of the metric are better, ``"max"`` for higher ones.
        best: True if the weights of the best report are restored at the end of the phase.
        settings: Settings of the optimizer during the phase, by glob; the first match counts.
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
        """Parse and check the dict of a phase.

        Raises:
            PolicyError: For an unknown key or an impossible value.
        """
        if not isinstance(written, Mapping):
            raise PolicyError(f"expected a dict with keys 'params' and 'until', got {shown(written)}")
        keys = ("params", "until", "best")
        general = {key: value for key, value in written.items() if key not in keys}
        _check_keys([key for key, value in general.items() if isinstance(value, Mapping)], keys, "key")
        until = {} if written.get("until") is None else written["until"]
        if not isinstance(until, Mapping):
            raise PolicyError(f"until: expected a dict such as {{'epochs': 1}}, got {shown(until)}")
        _check_keys(until, (*COUNTS, *METRIC), "key", "until")
        given, metric = written.get("params"), until.get("metric")
        params = as_patterns(list(given) if isinstance(given, Mapping) else given)
        if not params or not all(isinstance(pattern, str) for pattern in params):
            raise PolicyError(f"params: expected globs of what trains, got {shown(written.get('params'))}")
        if metric is None and until.keys() & METRIC:
            raise PolicyError(f"until.{min(until.keys() & METRIC)}: goes with until.metric, which is missing")
        if metric is not None and not isinstance(metric, str):
            raise PolicyError(f"until.metric: expected the name of a metric, got {shown(metric)}")
        best = check_flag("best", written.get("best", False))
        if best and metric is None:
            raise PolicyError("best: needs until.metric, which says what is best")
        settings = {}
        for pattern, each in given.items() if isinstance(given, Mapping) else [("*", None)]:
            with under(f"params: {shown(pattern)}") if each else nullcontext():
                settings[pattern] = _settings(general, each)
        return cls(
            params,
            {key: check_integer(f"until.{key}", until[key], least=1) for key in COUNTS if key in until},
            metric,
            check_integer("until.patience", until.get("patience", 3), least=1),
            check_number("until.min_delta", until.get("min_delta", 0.0)),
            check_choice("until.mode", until.get("mode", "min"), ("min", "max")),
            best,
            settings,
        )


class Phases(LayerSource):
    """Trains in consecutive phases, each with its own parameters.

    A phase is a dict:

    - ``params``: globs of the parameters that train; all others are frozen. Phases may overlap, and may
      freeze parameters that trained before.
    - ``until``: the end of the phase, by the first of these conditions: ``steps`` or ``epochs`` since its
      start; ``epoch``, counted over the full training; ``metric``, after ``patience`` (3) consecutive
      reports without an improvement by more than ``min_delta`` (0), where ``mode`` is ``"min"`` or ``"max"``.
      Only the last phase may have no end.
    - ``best``: if True, the weights of the best report are restored at the end of the phase or the training.
      The optimizer state and buffers are not.
    - ``lr`` and other settings of the optimizer (``weight_decay``, ``betas`` …) of the phase's parameters. A
      learning rate replaces that of the optimizer, and is scaled by schedulers. A function of the steps since
      the start of the phase, such as a schedule of :mod:`gradpolicy.schedules`, is the final rate. For
      different settings of parameters ``params`` may be a dict from globs to settings.

    The callback of Lightning reports the metrics that were logged in a validation, that of Hugging Face the
    metrics of an evaluation; in a training loop call :meth:`report`. The mean over all ranks is used.

    If the last phase has an end, Lightning's training stops there.

    Args:
        phases: The phases.
        **wrong: Other arguments raise an error, since the phases determine the changes of masks.

    Attributes:
        phase: The index of the current phase.

    Raises:
        PolicyError: For an unknown key, an impossible value, or a phase without an end before the last; when
            the run starts, if a glob matches nothing, or a phase ends by a metric and the trainer evaluates
            nothing; later, if a metric was not logged.

    Example:
        >>> import torch
        >>> source = Phases([{"params": "head.*", "until": {"steps": 2}}, {"params": "*"}])
        >>> source.setup({name: torch.zeros(2) for name in ("trunk.weight", "head.weight")}, seed=0)
        >>> [source.masks(step, epoch=0)["trunk.weight"] for step in range(4)]
        [False, False, True, True]
    """

    phase = 0
    remembered = {"phase": 0, "_began": None, "_reports": [None, None, 0], "_kept": {}}

    def __init__(self, phases: Sequence[Mapping[str, Any]], **wrong: Any) -> None:
        super().__init__(**wrong)
        if wrong:
            raise PolicyError(f"Phases.{min(wrong)}: means nothing here; a phase says what ends it in until")
        if isinstance(phases, str | Mapping) or not isinstance(phases, Iterable) or not list(phases):
            raise PolicyError(f"Phases.phases: expected a list of phases, got {shown(phases)}")
        self.phases = [dict(each) if isinstance(each, Mapping) else each for each in phases]
        self._read: list[Phase] = []
        for index, written in enumerate(self.phases):
            with under(f"Phases.phases[{index}]"):
                phase = Phase.read(written)
                self._read.append(phase)
                if not (phase.limits or phase.metric) and index + 1 < len(self.phases):
                    raise PolicyError(
                        "until: is missing, so that the phases after it are never reached; name steps, "
                        "epochs or a metric"
                    )
        self.writes_weights = self.restores_weights = any(each.best for each in self._read)
        self.setting_names = {
            name for each in self._read for settings in each.settings.values() for name in settings
        }
        self.metrics = [each.metric for each in self._read if each.metric is not None]
        counts_epochs = any(each.limits.keys() - {"steps"} for each in self._read)
        self.timetable = Timetable(unit="epoch" if counts_epochs else "step", every=1)

    def prepare(self) -> None:
        """Find the parameters of each phase, and start with the first phase."""
        self.layer_groups = []
        self._settings: list[dict[str, Mapping[str, Any]]] = []
        for index, phase in enumerate(self._read):
            with under(f"Phases.phases[{index}].params"):
                names = tuple(match_names(phase.params, self.parameters, "parameter"))
                self._settings.append(_by_name(phase.settings, names))
            self.layer_groups.append(Layer(shortened(list(phase.params), most=2), names, True))
        self._begin(0)

    def _begin(self, phase: int, step: int | None = None, epoch: int = 0) -> None:
        """Begin a phase; without a step the first one begins with the first masks."""
        self.phase = phase
        # The step and epoch at the start of the phase.
        self._began: list[int] | None = None if step is None else [step, epoch]
        # The reference of improvements and the best value, of which lower ones are better, and the reports
        # since the last improvement.
        self._reports: list[Any] = [math.inf, math.inf, 0]
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def masks(self, step: int, epoch: int) -> Mapping[str, Mask]:
        """Return one flag for each parameter, after starting the next phase if one has ended."""
        self._began = self._began or [step, epoch]
        while self.overdue(step, epoch):
            self._put_back()
            self._begin(self.phase + 1, step, epoch)
        return super().masks(step, epoch)

    def frozen_names(self, step: int, epoch: int) -> set[str]:
        """Return the names of parameters that do not train in the current phase."""
        return set(self.parameters).difference(self.layer_groups[self.phase].parameters)

    def settings(self, step: int, epoch: int) -> Mapping[str, Mapping[str, Any]]:
        """Return the settings of the current phase, with the current values of functions."""
        if not self._settings[self.phase]:
            return {}
        passed = 0 if self._began is None else step - self._began[0]
        return {
            name: {key: value_at(value, passed) for key, value in settings.items()}
            for name, settings in self._settings[self.phase].items()
        }

    def overdue(self, step: int, epoch: int) -> bool:
        """Return True if the current phase has ended and there is another one."""
        return self.phase + 1 < len(self._read) and self._is_over(step, epoch)

    def is_finished(self, step: int, epoch: int) -> bool:
        """Return True if the last phase has ended."""
        return self.phase + 1 == len(self._read) and self._is_over(step, epoch)

    def _is_over(self, step: int, epoch: int) -> bool:
        if self._began is None:
            return False
        phase, (first_step, first_epoch) = self._read[self.phase], self._began
        counts = {"steps": step - first_step, "epochs": epoch - first_epoch, "epoch": epoch}
        stalled = phase.metric is not None and self._reports[2] >= phase.patience
        return stalled or any(counts[key] >= limit for key, limit in phase.limits.items())

    def report(self, metrics: Mapping[str, Any]) -> None:
        """Process the metrics of a validation of the current weights.

        Args:
            metrics: The metrics by name. Every rank must report.

        Raises:
            PolicyError: If the metric of the phase is missing.
        """
        phase = self._read[self.phase]
        if phase.metric is None or self._began is None:
            return
        if phase.metric not in metrics:
            raise PolicyError(
                f"Phases.phases[{self.phase}].until.metric: {shown(phase.metric)} was not logged; "
                f"{nearest(phase.metric, map(str, metrics))}"
            )
        value = mean_of_ranks(float(metrics[phase.metric])) * (1 if phase.mode == "min" else -1)
        reference, best, waited = self._reports
        if value < best:
            best = value
            if phase.best:
                names = self.layer_groups[self.phase].parameters
                self._kept = {name: self.parameters[name].detach().clone() for name in names}
        improved = value < reference - phase.min_delta
        self._reports = [value if improved else reference, best, 0 if improved else waited + 1]

    def finish(self) -> None:
        """Restore the best weights of the last phase, and warn of phases that never started."""
        self._put_back()
        if self._began is not None and self.phase + 1 < len(self._read):
            warn_user(
                f"Phases: the training ended in phase {self.phase} (params "
                f"{', '.join(self._read[self.phase].params)}); {len(self._read) - 1 - self.phase} more never "
                "started"
            )

    @torch.no_grad()
    def _put_back(self) -> None:
        kept, self._kept = self._kept, {}
        for name, best in kept.items():
            local_shard(self.parameters[name].detach()).copy_(local_shard(best))

    def may_freeze(self) -> set[str]:
        """Return the names of parameters that do not train in all phases."""
        return set().union(*(self.parameters.keys() - set(each.parameters) for each in self.layer_groups))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the result of :meth:`state_dict`.

        Raises:
            PolicyError: If it is damaged, or there are fewer phases than in the saved run.
        """
        super().load_state_dict(state)
        check_integer("Phases.phase", self.phase, least=0)
        if self.phase >= len(self._read):
            raise PolicyError(
                f"Phases.phases: the checkpoint was saved in phase {self.phase}, but this run has "
                f"{len(self._read)} phases"
            )

    def describe(self) -> dict[str, Any]:
        """Return the number of phases. The plan lists their parameters."""
        return {"phases": len(self.phases)}

    def __repr__(self) -> str:
        return f"Phases({self.phases!r})"


def _settings(general: Mapping[str, Any], special: object = None) -> dict[str, Any]:
    """Return settings of the optimizer, with ``lr`` as ``initial_lr``, or as ``rate`` if it is a function."""
    if not isinstance(special, Mapping | None):
        raise PolicyError(f"expected a dict of settings such as {{'lr': 1e-4}}, got {shown(special)}")
    both = {**general, **(special or {})}
    found = {name: tuple(value) if isinstance(value, list) else value for name, value in both.items()}
    for name in (name for name, value in found.items() if not callable(value)):
        check_setting(name, found[name])
    if "lr" in found:
        rate = found.pop("lr")
        found["rate" if callable(rate) else "initial_lr"] = rate
    return found


def _by_name(settings: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> dict[str, Mapping[str, Any]]:
    """Return the settings of each parameter, from the first glob that matches."""
    found: dict[str, Mapping[str, Any]] = {}
    for pattern, of_pattern in settings.items():
        for name in match_names((pattern,), names, "parameter"):
            found.setdefault(name, of_pattern)
    return {name: of_pattern for name, of_pattern in found.items() if of_pattern}


def _check_keys(written: Iterable[str], known: Sequence[str], kind: str, key: str | None = None) -> None:
    for name in written:
        if name not in known:
            raise unknown(kind, str(name), known, key=key)
