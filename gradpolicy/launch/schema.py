"""The keys of the composed config that belong to no group, and what each may hold."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gradpolicy.checks import LARGEST_SEED
from gradpolicy.errors import PolicyError, brief, nearest, shown

Node = dict[str, Any]


def _several(value: Any) -> Any:
    """One word stands for a list of one."""
    return [value] if isinstance(value, str) else value


class Strict(BaseModel):
    """Takes no other keys than its own, and no text in place of a number."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Extras(Strict):
    """What is printed and checked beside the run."""

    print_config: bool = True
    plan: bool = True
    traceback: bool = False


class Paths(Strict):
    """Where things lie."""

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
    policy: dict[str, Node | None] | None = None
    trainer: Node
    callbacks: dict[str, Node | None] | None = None
    logger: dict[str, Node | None] | None = None
    paths: Paths
    sweep: Any = None

    task_name: str = "train"
    tags: Annotated[list[str], BeforeValidator(_several)] = Field(default_factory=list)
    seed: Annotated[int, Field(ge=0, le=LARGEST_SEED)] = 0
    train: bool = True
    test: bool = True
    plan_only: bool = False
    ckpt_path: str | None = None
    optimized_metric: str | None = None
    optimized_mode: Literal["min", "max"] = "max"
    allowed_targets: Annotated[list[str], BeforeValidator(_several)] = Field(default_factory=list)
    user: Node = Field(default_factory=dict)
    extras: Extras = Field(default_factory=Extras)


def read_settings(config: Node) -> Settings:
    """Checks the keys at the top of a resolved config, and their types.

    Raises:
        PolicyError: For an unknown key, a missing one, or a value of the wrong type.
    """
    try:
        return Settings.model_validate(config)
    except ValidationError as error:
        raise _first_problem(error) from error


def _first_problem(error: ValidationError) -> PolicyError:
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"] if not str(part).startswith("function-")]
    key = brief(".".join(path))
    if problem["type"] == "extra_forbidden":
        owner = Extras if path[0] == "extras" else Settings
        hint = nearest(path[-1], owner.model_fields)
        return PolicyError(f"{key}: there is no such key; {hint} (values of your own go under `user`)")
    if problem["type"] == "missing":
        return PolicyError(f"{key}: is missing")
    if problem["type"] == "dict_type":
        return PolicyError(f"{key}: must be a mapping of keys to values, got {shown(problem['input'])}")
    return PolicyError(f"{key}: {_lowered(problem['msg'])}, got {shown(problem['input'])}")


def _lowered(message: str) -> str:
    return (message[:1].lower() + message[1:]).replace("input should be", "must be")
