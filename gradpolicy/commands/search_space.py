"""The search space of a sweep, in the format of W&B's sweeps."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from gradpolicy.errors import PolicyError, unknown

if TYPE_CHECKING:
    from optuna.trial import Trial

# W&B's distributions: the bounds that each needs, and how Optuna draws from it.
DISTRIBUTIONS: dict[str, tuple[tuple[str, ...], Callable[["Trial", str, Any], Any]]] = {
    "uniform": (("min", "max"), lambda trial, key, given: trial.suggest_float(key, given.min, given.max)),
    "log_uniform_values": (
        ("min", "max"),
        lambda trial, key, given: trial.suggest_float(key, given.min, given.max, log=True),
    ),
    "q_uniform": (
        ("min", "max", "q"),
        lambda trial, key, given: trial.suggest_float(key, given.min, given.max, step=given.q),
    ),
    "int_uniform": (("min", "max"), lambda trial, key, given: trial.suggest_int(key, given.min, given.max)),
    "categorical": (("values",), lambda trial, key, given: trial.suggest_categorical(key, given.values)),
    "constant": (("value",), lambda trial, key, given: given.value),
}


class Parameter(BaseModel):
    """The distribution of the values of one key."""

    distribution: str = ""
    min: int | float | None = None
    max: int | float | None = None
    q: int | float | None = Field(None, description="The step between values.")
    value: Any = None
    values: list[Any] | None = None

    def model_post_init(self, context: Any) -> None:
        """Choose the distribution by W&B's rules if it is not named."""
        if not self.distribution:
            whole = isinstance(self.min, int) and isinstance(self.max, int)
            named = self.model_fields_set
            kinds = {"value": "constant", "values": "categorical"}
            interval = "int_uniform" if whole else "uniform"
            self.distribution = next((kinds[key] for key in kinds if key in named), interval)

    def draw(self, trial: "Trial", key: str) -> Any:
        """Draw the value of a trial."""
        return DISTRIBUTIONS[self.distribution][1](trial, key, self)

    @property
    def first(self) -> Any:
        """One of the values, for checking the overrides."""
        if self.distribution == "constant":
            return self.value
        return self.values[0] if self.values else self.min


class Metric(BaseModel):
    """The metric that is optimized."""

    name: str
    goal: Literal["minimize", "maximize"] = "minimize"


class SearchSpace(BaseModel):
    """A search space: the keys and the distributions of their values."""

    model_config = ConfigDict(extra="allow")
    program: str = Field("train.py", description="The program that an agent of W&B runs.")
    method: Literal["grid", "random", "bayes"] = Field("bayes", description="The search method.")
    metric: Metric
    parameters: dict[str, Parameter] = Field(description="The distributions by key of the config.")
    command: list[str] = Field(
        default_factory=list, description="The command of an agent of W&B, as a list of words."
    )


def read_space(name: str, directories: Sequence[Path]) -> SearchSpace:
    """Read a search space.

    Args:
        name: Its name.
        directories: The directories to search, in this order.

    Raises:
        PolicyError: If there is none, or it has a distribution that is unknown or lacks a bound.
    """
    found = [file for directory in directories for file in sorted(directory.glob("*.yaml"))]
    spaces = {file.stem: file for file in reversed(found) if "parameters:" in file.read_text("utf-8")}
    if name not in spaces:
        raise unknown("search space", name, spaces, key="sweep")
    try:
        space = SearchSpace.model_validate(yaml.safe_load(spaces[name].read_text("utf-8")))
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"])) or f"sweep={name}"
        raise PolicyError(f"{key}: {problem['msg'].lower()}") from error
    for key, parameter in space.parameters.items():
        _check(f"parameters.{key}", key, parameter)
    return space


def _check(full_key: str, key: str, parameter: Parameter) -> None:
    if key.lstrip("+~").split(".")[0].split("/")[0] in ("hydra", "allowed_targets"):
        raise PolicyError(f"{full_key}: can only be set on the command line")
    if parameter.distribution not in DISTRIBUTIONS:
        raise unknown("distribution", parameter.distribution, DISTRIBUTIONS, key=full_key)
    bounds, _ = DISTRIBUTIONS[parameter.distribution]
    lacking = [bound for bound in bounds if bound not in parameter.model_fields_set]
    if lacking:
        raise PolicyError(f"{full_key}: {parameter.distribution} needs {', '.join(lacking)}")
