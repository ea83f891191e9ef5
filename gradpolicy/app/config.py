"""The config of a job: composed by Hydra, then its keys, types and arguments checked."""

import itertools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra import compose, initialize_config_dir
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gradpolicy.app.messages import one_line, type_error
from gradpolicy.checks import LARGEST_SEED
from gradpolicy.errors import PolicyError, brief, nearest, under
from gradpolicy.imports import import_by_name

VERSION_BASE = "1.3"
# The plugin's own config has the same name. `hydra/launcher=submitit_slurm` means this project's.
SAME_NAME = r"\s*'hydra/launcher/submitit_slurm' is validated against ConfigStore schema"
# Modules that import torch are imported in functions, so that a wrong key is reported at once.


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Node = dict[str, Any]
# A removed config of the group is null.
Group = dict[str, Node | None]
Names = Annotated[list[str], BeforeValidator(_as_list)]


class Strict(BaseModel):
    """A base model that forbids unknown keys, and does not convert strings to numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Extras(Strict):
    """Options for output and checks."""

    print_config: bool = False
    plan: bool = True
    report: bool = True
    traceback: bool = False


class Paths(Strict):
    """The directories of files."""

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
        PolicyError: For invalid input.
    """
    container = resolved(config)
    try:
        settings = Settings.model_validate(container)
    except ValidationError as error:
        raise _first_problem(error) from error
    if not (settings.train or settings.test or settings.plan_only):
        raise PolicyError("train=false test=false leaves nothing to do; plan_only=true prints the plan")
    for name in {"callbacks", "logger"} & settings.trainer.keys():
        raise PolicyError(f"trainer.{name}: the group `{name}` decides: {name}.mine={{_target_: …}}")
    load_extensions(settings.extensions)
    from gradpolicy.app.targets import build_all, check_arguments
    from gradpolicy.policies import Policy

    # Policies before modules that take seconds to import. The optimizer before the model, which refers to it,
    # so that the error names the key that the user set.
    for key in sorted(container, key=lambda key: (key != "policy", key == "model")):
        if isinstance(container[key], dict):
            check_arguments(container[key], key)
        if key == "policy":
            build_all(container[key], key, Policy)
    return settings


def load_extensions(names: list[str]) -> None:
    """Import the user's modules that register rules or update rules.

    Raises:
        PolicyError: If one cannot be imported.
    """
    for name in names:
        with under("extensions"):
            import_by_name(name)


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


def _first_problem(error: ValidationError) -> PolicyError:
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    key = brief(".".join(path))
    if problem["type"] == "extra_forbidden":
        owner = Extras if path[0] == "extras" else Settings
        hint = nearest(path[-1], owner.model_fields)
        return PolicyError(f"{key}: there is no such key; {hint} (values of your own go under `user`)")
    if problem["type"] == "missing":
        return PolicyError(f"{key}: is missing")
    return type_error(key, [problem])


# ---- composing


@dataclass(frozen=True)
class Source:
    """The directories of configs.

    Args:
        directory: The directory of configs.
        name: The name of the primary config.
        more: A second directory, from ``--config-dir``. If both have a config of the same name, the one in
            `directory` is used.
    """

    directory: Path
    name: str = "train"
    more: Path | None = None


class SecondDirectory(SearchPathPlugin):
    """Adds the directory of ``--config-dir`` after that of configs."""

    directory: Path | None = None

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add the directory."""
        if self.directory is not None:
            search_path.append("command-line", f"file://{self.directory}")


@contextmanager
def hydra_at(source: Source) -> Iterator[None]:
    """Initialise Hydra for the block.

    Raises:
        PolicyError: If a directory does not exist.
    """
    for directory in (source.directory, source.more):
        if directory is not None and not directory.is_dir():
            raise PolicyError(f"config directory {directory} does not exist")
    Plugins.instance().register(SecondDirectory)
    SecondDirectory.directory = source.more
    former = HydraConfig.instance().cfg
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SAME_NAME)
        try:
            with initialize_config_dir(str(source.directory), job_name="train", version_base=VERSION_BASE):
                SecondDirectory.directory = None
                yield
        finally:
            HydraConfig.instance().cfg = former


@contextmanager
def hydra_config(config: DictConfig) -> Iterator[None]:
    """Let resolvers such as `${hydra:job.name}` read a composed config in the block."""
    former = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        yield
    finally:
        HydraConfig.instance().cfg = former


def check_job(config: DictConfig) -> Settings:
    """Return the part of a composed job without Hydra's, resolved and checked.

    Raises:
        PolicyError: For invalid input.
    """
    job = config.copy()
    with read_write(job), open_dict(job):
        del job["hydra"]
    settings = check_config(job)
    if settings.paths.output_dir != config.hydra.runtime.output_dir:
        raise PolicyError("paths.output_dir: is the directory of the run; name it by hydra.run.dir=…")
    return settings


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse the overrides of a command line."""
    return OverridesParser.create().parse_overrides(list(overrides))


def compose_job(source: Source, overrides: list[str]) -> DictConfig:
    """Compose one job's config, including Hydra's own part; call it within :func:`hydra_at`.

    Raises:
        PolicyError: For a choice or key that does not exist, with the nearest ones, and for other errors of
            composition.
    """
    try:
        config = compose(source.name, overrides, return_hydra_config=True)
    except Exception as error:
        # Hydra raises various errors for unusual input, such as a name that is too long for a file.
        raise _explained(error, source, overrides) from error
    with read_write(config), open_dict(config):
        # Hydra sets it when a job starts. Until then the keys that refer to it need some directory.
        config.hydra.runtime.output_dir = str(Path.cwd())
    HydraConfig.instance().set_config(config)
    return config


def default_config() -> DictConfig | None:
    """Return the running job's config without overrides; None if Hydra is not initialised.

    A launcher that runs jobs in separate processes does not initialise Hydra there.
    """
    if not GlobalHydra.instance().is_initialized() or not HydraConfig.initialized():
        return None
    return compose(HydraConfig.get().job.config_name)


def fixed_overrides(overrides: list[str]) -> list[str]:
    """Return the overrides without sweeps, which all jobs have in common."""
    return [
        line
        for line, override in zip(overrides, parsed(overrides), strict=True)
        if not override.is_sweep_override()
    ]


def jobs_of(config: DictConfig, overrides: list[str]) -> list[list[str]]:
    """Return the overrides of each job of a sweep, as Hydra's own sweeper determines them.

    Returns:
        The overrides; empty if they are not known in advance, as with another sweeper that draws values.
    """
    from_config = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    every = parsed([*from_config, *overrides])
    sweeps = [override for override in every if override.is_sweep_override()]
    if not config.hydra.sweeper._target_.endswith("BasicSweeper") or not all(
        override.is_discrete_sweep() for override in sweeps
    ):
        return []
    lines = {}
    for override in every:
        key, is_sweep = override.get_key_element(), override.is_sweep_override()
        values = override.sweep_string_iterator() if is_sweep else [override.get_value_element_as_str()]
        lines[key] = [f"{key}={value}" for value in values]
    return [list(job) for job in itertools.product(*lines.values())]


# ---- what is wrong with a command line


def _explained(error: Exception, source: Source, overrides: Sequence[str]) -> PolicyError:
    """Return Hydra's message with the key of the first override that fails, and the nearest names."""
    # Choices of groups first, since they determine the keys.
    ordered = sorted(parsed(overrides), key=lambda override: not _choices(override.key_or_group, source))
    lines = [str(override.input_line) for override in ordered]
    for count in range(len(lines) + 1):
        try:
            before = compose(source.name, lines[:count], return_hydra_config=True)
        except Exception as found:
            error = found
            break
    else:
        count = 0
    if count == 0:
        return PolicyError(one_line(error))
    override = ordered[count - 1]
    key = override.key_or_group
    names = _choices(key, source)
    if names and not override.is_delete():
        value: Any = override.value()
        wrong = [name for name in (value if isinstance(value, list) else [value]) if name not in names]
        if wrong:
            name = "null" if wrong[0] is None else str(wrong[0])
            return PolicyError(f"{brief(f'{key}={name}')}: there is no such config; {nearest(name, names)}")
    missing = _missing_key(before, key)
    if missing is not None and not names:
        plus = "" if override.is_delete() else f"; a new key takes a plus: +{brief(key)}=…"
        return PolicyError(f"{missing}{plus}")
    return PolicyError(f"{brief(key)}: {one_line(error)}")


def _choices(group: str, source: Source) -> list[str]:
    """Return the names of a group's configs, in every directory and package of the search path."""
    try:
        return GlobalHydra.instance().config_loader().get_group_options(group, config_name=source.name)
    except (OSError, ValueError):
        # A name that no directory can have, such as one that is too long.
        return []


def _missing_key(config: DictConfig, key: str) -> str | None:
    """Return a message with the missing part of a key and the nearest names; None if the key exists."""
    node: Any = config
    parts = key.replace("/", ".").split(".")
    for depth, part in enumerate(parts):
        known = [str(name) for name in node] if OmegaConf.is_dict(node) else []
        if part not in known:
            hint = nearest(part, set(known) - {"_target_", "_partial_", "hydra"})
            return f"{brief('.'.join(parts[: depth + 1]))}: there is no such key; {hint}".rstrip("; ")
        node = OmegaConf.select(node, part, throw_on_missing=False)
    return None
