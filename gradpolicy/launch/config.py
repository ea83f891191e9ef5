"""The composed config of a job: its keys, their types, and its check."""

from types import ModuleType
from typing import Annotated, Any, Literal

from omegaconf import DictConfig, OmegaConf
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gradpolicy.checks import LARGEST_SEED
from gradpolicy.errors import PolicyError, brief, nearest, shown
from gradpolicy.imports import import_by_name
from gradpolicy.launch.messages import type_error

# Modules that import torch are imported where they are used, so that a wrong key is refused at once.

# Lightning accepts less, and then divides by zero, or reverses gradients by a negative norm.
TRAINER_LEAST = {
    "accumulate_grad_batches": 1,
    "check_val_every_n_epoch": 1,
    "gradient_clip_val": 0,
    "log_every_n_steps": 0,
    "num_sanity_val_steps": -1,
}


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Node = dict[str, Any]
# Groups that hold nodes by names of their own.
NAMED_NODES = ("callbacks", "logger", "policy")
# A config of the group that was taken away is null.
Group = dict[str, Node | None]
Names = Annotated[list[str], BeforeValidator(_as_list)]


class Strict(BaseModel):
    """Has no keys but its own, and converts no text to a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Extras(Strict):
    """Output and checks besides the run."""

    print_config: bool = False
    plan: bool = True
    report: bool = True
    traceback: bool = False


class Paths(Strict):
    """Where files are read and written."""

    model_config = ConfigDict(extra="allow", strict=True)
    root_dir: str
    data_dir: str
    log_dir: str
    output_dir: str


class Settings(Strict):
    """The composed config, resolved."""

    data: Node
    model: Node
    optimizer: Node | None = None
    policy: Group | None = None
    trainer: Node
    callbacks: Group | None = None
    logger: Group | None = None
    paths: Paths
    sweep: Any = None

    task_name: str = "train"
    tags: Names = Field(default_factory=list)
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    train: bool = True
    test: bool = True
    plan_only: bool = False
    ckpt_path: str | None = None
    optimized_metric: str | None = None
    optimized_mode: Literal["min", "max"] = "max"
    allowed_targets: Names = Field(default_factory=list)
    extensions: Names = Field(default_factory=list)
    user: Node = Field(default_factory=dict)
    extras: Extras = Field(default_factory=Extras)


def check_config(config: DictConfig) -> Settings:
    """Check a job's config: references, keys, types, targets and their arguments; build only policies.

    Args:
        config: The config, without Hydra's own part.

    Returns:
        The config with every reference in it resolved.

    Raises:
        PolicyError: For wrong input.
    """
    container = resolved(config)
    try:
        settings = Settings.model_validate(container)
    except ValidationError as error:
        raise _first_problem(error, container) from error
    if not (settings.train or settings.test or settings.plan_only):
        raise PolicyError("train=false test=false leaves nothing to do; plan_only=true prints the plan")
    _check_trainer(settings.trainer)
    load_extensions(settings.extensions)
    from gradpolicy.launch.target_arguments import check_arguments
    from gradpolicy.launch.targets import build_all
    from gradpolicy.policies import Policy

    # Policies before what takes seconds to import. The optimizer before the model, which refers to it: a
    # message should name the key that a person set.
    for key in sorted(container, key=lambda key: (key != "policy", key == "model")):
        if isinstance(container[key], dict):
            check_arguments(container[key], key)
        if key == "policy":
            build_all(container[key], key, Policy)
    return settings


def load_extensions(names: list[str]) -> None:
    """Import the modules that register rules, masks or update rules of a person's own.

    Raises:
        PolicyError: If one lies in a package that the person has not allowed, or cannot be imported.
    """
    for name in names:
        try:
            found = import_by_name(name)
        except PolicyError as error:
            raise PolicyError(f"extensions: {error}") from error
        if not isinstance(found, ModuleType):
            raise PolicyError(f"extensions: {shown(name)} is no module; name the one that it lies in")


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain containers, with every reference in it resolved.

    `sweep`, the search space of `gradpolicy sweep`, is left out. A policy's `when` needs no `_target_`.
    """
    plain = OmegaConf.create({key: config._get_node(key) for key in config if key != "sweep"})
    container = OmegaConf.to_container(plain, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    for node in (container.get("policy") or {}).values():
        when = node.get("when") if isinstance(node, dict) else None
        if isinstance(when, dict):
            when.setdefault("_target_", "gradpolicy.When")
    return {str(key): value for key, value in container.items()}


def _check_trainer(trainer: Node) -> None:
    for name in ("callbacks", "logger"):
        if name in trainer:
            raise PolicyError(f"trainer.{name}: the group `{name}` decides: {name}.mine={{_target_: …}}")
    for name, least in TRAINER_LEAST.items():
        given = trainer.get(name)
        if isinstance(given, int | float) and not given >= least:
            raise PolicyError(f"trainer.{name}: {shown(given)} given, at least {least} needed")
    interval = trainer.get("val_check_interval")
    if isinstance(interval, int | float) and not interval > 0:
        raise PolicyError(f"trainer.val_check_interval: {shown(interval)} given, more than 0 needed")


def _first_problem(error: ValidationError, container: Node) -> PolicyError:
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    key = brief(".".join(path))
    if path[0] in NAMED_NODES and len(path) > 1 and "_target_" in container[path[0]]:
        return PolicyError(
            f"{path[0]}: {path[0]}._target_ has no name above it: write a line such as `mine:` before it, "
            "and indent all that belongs to it"
        )
    if problem["type"] == "extra_forbidden":
        owner = Extras if path[0] == "extras" else Settings
        hint = nearest(path[-1], owner.model_fields)
        return PolicyError(f"{key}: there is no such key; {hint} (values of your own go under `user`)")
    if problem["type"] == "missing":
        return PolicyError(f"{key}: is missing")
    return type_error(key, [problem])
