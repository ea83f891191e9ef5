"""Searches the space of a sweep config with Optuna."""

import json
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import optuna
from omegaconf import OmegaConf
from optuna.trial import Trial, TrialState
from optuna_integration import PyTorchLightningPruningCallback

from gradpolicy.app.config import Source, check_job, compose_job, hydra_at
from gradpolicy.app.launch import main as train
from gradpolicy.app.messages import INTERRUPTED, TERMINATED, WRONG_INPUT
from gradpolicy.app.processes import quoted, termination_exits
from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.insight.run_files import RESULT, Result
from gradpolicy.insight.sweep_summary import summarize


def make_pruner() -> optuna.pruners.BasePruner:
    """Return the pruner of every study: after two reports, a trial below the median of five others ends.

    A study does not store its pruner, so each process that opens it creates one.
    """
    return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2)


class PruneTrial(PyTorchLightningPruningCallback):
    """Optuna's pruning callback, with arguments that a config can have.

    Args:
        storage: The storage of the study, such as ``sqlite:///study.db``.
        study: The study's name.
        trial: The trial's number in the storage.
        monitor: The metric that is reported after each validation.
    """

    def __init__(self, storage: str, study: str, trial: int, monitor: str) -> None:
        opened = optuna.load_study(study_name=study, storage=storage, pruner=make_pruner())
        super().__init__(Trial(opened, trial), monitor)


class SearchEndedError(Exception):
    """Raised if no other trial may follow, with the exit code: after Ctrl-C, SIGTERM or invalid input."""


class TrialFailedError(Exception):
    """Raised if a trial failed; the search continues."""


@dataclass(frozen=True)
class Search:
    """The settings of a search, which all its trials share.

    Args:
        study: The study.
        url: The storage of the study.
        parameters: The values that are drawn, by key: a list, or a mapping of ``min``, ``max`` and perhaps
            ``log: true``, of two integers or two numbers.
        overrides: The overrides of all trials.
        directory: The directory of the trials.
        metric: The metric that is optimized.
        mode: ``"min"`` or ``"max"``.
        config_dir: The directory of configs.
    """

    study: optuna.Study
    url: str
    parameters: Mapping[str, Any]
    overrides: list[str]
    directory: Path
    metric: str
    mode: str
    config_dir: Path


def search(config_dir: Path, overrides: list[str], directory: Path, trials: int, seed: int) -> int:
    """Search the space that the overrides name.

    Args:
        config_dir: The directory of configs.
        overrides: The overrides of all trials.
        directory: The directory of the trials and of the study.
        trials: The total number of trials, including earlier ones.
        seed: The seed of the sampler.

    Returns:
        The exit code: 0, 2 for invalid input, 143 for SIGTERM.

    Raises:
        PolicyError: For invalid input.
    """
    with termination_exits():
        found = prepare(config_dir, overrides, directory.absolute(), seed)
        code = run_trials(found, trials)
    if code != WRONG_INPUT:
        summarize(found.directory, found.metric, found.mode, report=True)
    return code


def prepare(config_dir: Path, overrides: list[str], directory: Path, seed: int) -> Search:
    """Read the search space, and open the study or create it."""
    source = Source(config_dir)
    with hydra_at(source):
        config = compose_job(source, overrides)
        sweep = config.get("sweep")
        space: Any = OmegaConf.to_container(sweep, resolve=True) if OmegaConf.is_config(sweep) else {}
        parameters = space.get("parameters") if isinstance(space, dict) else None
        if not isinstance(parameters, dict) or not parameters:
            raise PolicyError(
                "sweep: name one search space, a config of the group sweep with parameters, such as"
                " sweep=learning_rate"
            )
        # Check the overrides with one value of each parameter.
        first = [f"{key}={json.dumps(check_space(key, each))}" for key, each in parameters.items()]
        settings = check_job(compose_job(source, [*overrides, *first]))
        name = str(config.hydra.runtime.choices.sweep)
    metric, mode = settings.optimized_metric, settings.optimized_mode
    if metric is None:
        raise PolicyError("optimized_metric: must name the metric that the search compares, got None")
    directory.mkdir(parents=True, exist_ok=True)
    url = f"sqlite:///{directory / 'study.db'}"
    study = open_study(url, name, metric, mode, seed)
    return Search(study, url, parameters, overrides, directory / name, metric, mode, config_dir)


def check_space(key: str, space: Any) -> Any:
    """Return one of the values of a parameter.

    Raises:
        PolicyError: If it is neither a list of values nor an interval.
    """
    if isinstance(space, list) and space:
        return space[0]
    if isinstance(space, dict) and {"min", "max"} <= space.keys() <= {"min", "max", "log"}:
        low, high = space["min"], space["max"]
        numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in (low, high))
        if numbers and low <= high and (low > 0 or not space.get("log")):
            return low
    raise PolicyError(
        f"sweep.parameters.{key}: must be a list of values, or numbers min and max and perhaps log: true,"
        f" got {shown(space)}"
    )


def draw(trial: Trial, key: str, space: Any) -> Any:
    """Draw the value of a trial."""
    if isinstance(space, list):
        return trial.suggest_categorical(key, space)
    integers = isinstance(space["min"], int) and isinstance(space["max"], int)
    suggest: Any = trial.suggest_int if integers else trial.suggest_float
    return suggest(key, space["min"], space["max"], log=bool(space.get("log")))


def open_study(url: str, name: str, metric: str, mode: str, seed: int) -> optuna.Study:
    """Open or create a study; trials whose process is gone count as failed.

    In dashboards the objective is named after the metric.
    """
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    storage = optuna.storages.RDBStorage(url, heartbeat_interval=30, grace_period=120)
    known = name in optuna.get_all_study_names(storage)
    done = len(optuna.load_study(study_name=name, storage=storage).trials) if known else 0
    study = optuna.create_study(
        study_name=name,
        storage=storage,
        direction="minimize" if mode == "min" else "maximize",
        # The same seed would repeat the first trials.
        sampler=optuna.samplers.TPESampler(seed=seed + done),
        pruner=make_pruner(),
        load_if_exists=True,
    )
    study.set_metric_names([metric])
    optuna.storages.fail_stale_trials(study)
    return study


def run_trials(search: Search, wanted: int) -> int:
    """Run trials until the study has the given number, and return the exit code."""
    good = (TrialState.COMPLETE, TrialState.PRUNED)
    missing = wanted - len(search.study.get_trials(states=good))
    if missing > 0:
        try:
            search.study.optimize(lambda trial: run_trial(trial, search), missing, catch=(TrialFailedError,))
        except SearchEndedError as ended:
            return int(ended.args[0])
    return 0


def run_trial(trial: Trial, search: Search) -> float:
    """Train once with drawn values, and return the value that is optimized."""
    directory = search.directory / str(trial.number)
    report = {
        "_target_": "gradpolicy.app.sweep.PruneTrial",
        "storage": search.url,
        "study": search.study.study_name,
        "trial": trial._trial_id,
        "monitor": search.metric.removesuffix("_best"),
    }
    words = [
        *search.overrides,
        *(f"{key}={json.dumps(draw(trial, key, each))}" for key, each in search.parameters.items()),
        *(f"+callbacks.study.{key}={json.dumps(value)}" for key, value in report.items()),
        f"hydra.run.dir={quoted(str(directory))}",
    ]
    try:
        code = train(search.config_dir, words)
    except optuna.TrialPruned:
        replace(Result.load(directory / RESULT), status="pruned", error="").save(directory / RESULT)
        raise
    if code in (INTERRUPTED, TERMINATED):
        search.study.enqueue_trial(trial.params)
    if code in (INTERRUPTED, TERMINATED, WRONG_INPUT):
        raise SearchEndedError(code)
    if code:
        raise TrialFailedError(f"trial {trial.number} ended with code {code}")
    # With several processes the callback ends the training as usual and stores this note.
    if search.study.trials[trial.number].system_attrs.get("ddp_pl:pruned"):
        raise optuna.TrialPruned
    result = Result.load(directory / RESULT)
    if result.optimized is None:
        raise unknown("metric", search.metric, result.metrics, key="optimized_metric")
    return result.optimized
