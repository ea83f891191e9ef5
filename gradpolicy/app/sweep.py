"""Searches the space of a sweep config with Optuna."""

import json
import warnings
from pathlib import Path
from typing import Any

import optuna
from omegaconf import OmegaConf
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.trial import TrialState

from gradpolicy.app import Exit
from gradpolicy.app.config import Settings, Source, check_config
from gradpolicy.app.launch import main as train
from gradpolicy.app.processes import quoted, termination_exits
from gradpolicy.errors import PolicyError, shown, unknown
from gradpolicy.insight.run_files import RESULT, Result
from gradpolicy.insight.sweep_summary import summarize

# The exit codes after which no other trial may follow.
ENDING = (Exit.INTERRUPTED, Exit.TERMINATED, Exit.WRONG_INPUT)


def search(config_dir: Path, overrides: list[str], directory: Path, trials: int, seed: int) -> int:
    """Search the space that the overrides name.

    Args:
        config_dir: The directory of configs.
        overrides: The overrides of all trials.
        directory: The directory of the trials and of the study.
        trials: The total number of trials, including earlier ones.
        seed: The seed of the sampler.

    Returns:
        The exit code: 0, 2 for invalid input, 130 for Ctrl-C, 143 for SIGTERM.

    Raises:
        PolicyError: For invalid input.
    """
    directory, code = directory.absolute(), 0
    with termination_exits():
        name, space, settings = read_space(Source(config_dir), overrides)
        metric, mode = settings.optimized_metric, settings.optimized_mode
        if metric is None:
            raise PolicyError("optimized_metric: must name the metric that the search compares, got None")
        directory.mkdir(parents=True, exist_ok=True)
        study = open_study(f"sqlite:///{directory / 'study.db'}", name, metric, mode, seed)
        directory /= name
        for _ in range(trials - len(study.get_trials(states=[TrialState.COMPLETE]))):
            trial, value = study.ask(space), None
            run = directory / str(trial.number)
            places = [f"hydra.sweep.dir={quoted(str(directory))}", f"hydra.run.dir={quoted(str(run))}"]
            drawn = [f"{key}={json.dumps(given)}" for key, given in trial.params.items()]
            try:
                code = train(config_dir, [*overrides, *drawn, *places])
                if not code:
                    value = optimized_value(run, metric)
            finally:
                study.tell(trial, value, TrialState.FAIL if value is None else None)
            if code in ENDING:
                # The next search begins with the values of a trial that was interrupted.
                if code != Exit.WRONG_INPUT:
                    study.enqueue_trial(trial.params)
                break
    if code != Exit.WRONG_INPUT:
        summarize(directory, metric, mode, report=True)
    return code if code in ENDING else 0


def read_space(source: Source, overrides: list[str]) -> tuple[str, dict[str, BaseDistribution], Settings]:
    """Return the name of the search space, its distributions by key, and the settings of a first trial."""
    with source.open():
        config = source.compose(overrides)
        sweep = config.get("sweep")
        space: Any = OmegaConf.to_container(sweep, resolve=True) if OmegaConf.is_config(sweep) else {}
        parameters = space.get("parameters") if isinstance(space, dict) else None
        if not isinstance(parameters, dict) or not parameters:
            raise PolicyError(
                "sweep: name one search space, a config of the group sweep with parameters, such as"
                " sweep=learning_rate"
            )
        found = {str(key): distribution(str(key), each) for key, each in parameters.items()}
        # Check the overrides with one value of each parameter.
        first = [f"{key}={json.dumps(_first(each))}" for key, each in found.items()]
        settings = check_config(source.compose([*overrides, *first]))
        return str(config.hydra.runtime.choices.sweep), found, settings


def distribution(key: str, space: Any) -> BaseDistribution:
    """Return the distribution of a parameter.

    Args:
        key: The parameter.
        space: A list of values, or a mapping of ``min``, ``max`` and perhaps ``log: true``, of two integers
            or two numbers.

    Raises:
        PolicyError: If it is neither.
    """
    try:
        if isinstance(space, list):
            return CategoricalDistribution(space)
        limits = {{"min": "low", "max": "high", "log": "log"}[name]: value for name, value in space.items()}
        integers = isinstance(space["min"], int) and isinstance(space["max"], int)
        return IntDistribution(**limits) if integers else FloatDistribution(**limits)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(
            f"sweep.parameters.{key}: must be a list of values, or numbers min and max and perhaps log: true,"
            f" got {shown(space)}"
        ) from error


def _first(space: Any) -> Any:
    return space.choices[0] if isinstance(space, CategoricalDistribution) else space.low


def open_study(url: str, name: str, metric: str, mode: str, seed: int) -> optuna.Study:
    """Open or create a study; in dashboards the objective is named after the metric."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    study = optuna.create_study(
        study_name=name,
        storage=url,
        direction="minimize" if mode == "min" else "maximize",
        load_if_exists=True,
    )
    # The same seed would repeat the first trials.
    study.sampler = optuna.samplers.TPESampler(seed=seed + len(study.trials))
    study.set_metric_names([metric])
    return study


def optimized_value(run: Path, metric: str) -> float:
    """Return the value of a completed run that the search compares.

    Raises:
        PolicyError: If the run has not logged the metric.
    """
    result = Result.load(run / RESULT)
    if result.optimized is None:
        raise unknown("metric", metric, result.metrics, key="optimized_metric")
    return result.optimized
