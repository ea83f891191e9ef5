"""The config of a job: composed by Hydra, then its keys, types and arguments checked."""

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, OmegaConfBaseException
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from gradpolicy.app.messages import explain, one_line, type_error
from gradpolicy.checks import LARGEST_SEED
from gradpolicy.errors import PolicyError, brief, nearest, under
from gradpolicy.imports import import_by_name, to_install

VERSION_BASE = "1.3"
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
        config: The config, which resolvers read: composed by :meth:`Source.compose`, or by Hydra in its job.

    Returns:
        The config without Hydra's own part, with every reference in it resolved.

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
    for name in settings.extensions:
        with under("extensions"):
            import_by_name(name)
    from gradpolicy.app.build import build_all, check_arguments
    from gradpolicy.policies import Policy

    # Policies before modules that take seconds to import. The optimizer before the model, which refers to it,
    # so that the error names the key that the user set.
    for key in sorted(container, key=lambda key: (key != "policy", key == "model")):
        if isinstance(container[key], dict):
            check_arguments(container[key], key)
        if key == "policy":
            build_all(container[key], key, Policy)
    if settings.paths.output_dir != HydraConfig.get().runtime.output_dir:
        raise PolicyError("paths.output_dir: is the directory of the run; name it by hydra.run.dir=…")
    return settings


def resolved(config: DictConfig) -> dict[str, Any]:
    """Return a config as plain containers, with every reference in it resolved.

    Hydra's own part, and `sweep`, the search space of `gradpolicy sweep`, are left out. A policy's `when`
    needs no `_target_`.
    """
    kept = OmegaConf.masked_copy(config, [str(key) for key in config if key not in ("hydra", "sweep")])
    container = OmegaConf.to_container(kept, resolve=True, throw_on_missing=True)
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
    """A directory of configs.

    Args:
        directory: The directory.
        name: The name of the primary config.
    """

    directory: Path
    name: str = "train"

    @contextmanager
    def open(self) -> Iterator[None]:
        """Initialise Hydra for the block, in which resolvers read the config that was composed last.

        Raises:
            PolicyError: If the directory does not exist; instead of an error of Hydra or OmegaConf.
        """
        if not self.directory.is_dir():
            raise PolicyError(f"config directory {self.directory} does not exist")
        former = HydraConfig.instance().cfg
        try:
            with initialize_config_dir(str(self.directory), job_name="train", version_base=VERSION_BASE):
                yield
        except (HydraException, OmegaConfBaseException) as error:
            raise PolicyError(explain(error)) from error
        finally:
            HydraConfig.instance().cfg = former

    def compose(self, overrides: list[str]) -> DictConfig:
        """Compose one job's config, including Hydra's own part; call it within :meth:`open`.

        Raises:
            PolicyError: For a choice or key that does not exist, with the nearest ones, and for other errors
                of composition.
        """
        try:
            config = compose(self.name, overrides, return_hydra_config=True)
        except Exception as error:
            # Hydra raises various errors for unusual input, such as a name that is too long for a file.
            raise self._explained(error, overrides) from error
        with read_write(config), open_dict(config):
            # Hydra sets it when a job starts. Until then the keys that refer to it need some directory.
            config.hydra.runtime.output_dir = str(Path.cwd())
        HydraConfig.instance().set_config(config)
        return config

    def _explained(self, error: Exception, overrides: list[str]) -> PolicyError:
        """Return Hydra's message with the key that is wrong and the nearest names."""
        cause, said = error.__cause__, one_line(error)
        if isinstance(error, MissingConfigException) and "/" in str(error.missing_cfg_file):
            group, _, name = str(error.missing_cfg_file).rpartition("/")
            return _no_such_config(group, name, error.options or self._names_of(group, overrides))
        if isinstance(cause, ConfigAttributeError | ConfigKeyError):
            key, known = brief(str(cause.full_key)), {str(name) for name in cause.parent_node or ()}
            hint = nearest(str(cause.key), known - {"_target_", "_partial_", "hydra"})
            said = "; ".join(filter(None, (hint, f"a new key takes a plus: +{key}=…")))
            return PolicyError(f"{key}: there is no such key; {said}")
        if isinstance(cause, OmegaConfBaseException):
            return PolicyError(explain(cause))
        if isinstance(error, ConfigCompositionException):
            key_named = re.search(r"'([\w./@-]+)[=']", said)
            said = "there is no such key" if said.endswith("does not exist.") else said
            return PolicyError(f"{brief(key_named[1])}: {said}" if key_named else said)
        if isinstance(error, ValueError):
            for key in (each.key_or_group for each in parsed(overrides) if each.value() is None):
                if names := self._names_of(key, overrides):
                    return _no_such_config(key, "null", names)
        return PolicyError(explain(error))

    def _names_of(self, group: str, overrides: list[str]) -> list[str]:
        """Return the names of a group's configs."""
        loader = GlobalHydra.instance().config_loader()
        return loader.get_group_options(group, config_name=self.name, overrides=overrides)


def _no_such_config(group: str, name: str, names: Sequence[str]) -> PolicyError:
    if group == "hydra/launcher" and name.startswith(("joblib", "submitit")):
        return PolicyError(f"{group}={name}: {to_install(ModuleNotFoundError(name='hydra_plugins'))}")
    return PolicyError(f"{brief(f'{group}={name}')}: there is no such config; {nearest(name, names)}")


# ---- overrides


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse the overrides of a command line."""
    return OverridesParser.create().parse_overrides(list(overrides))


def fixed_overrides(overrides: list[str]) -> list[str]:
    """Return the overrides without sweeps, which all jobs have in common."""
    return [str(each.input_line) for each in parsed(overrides) if not each.is_sweep_override()]


def sweep_values(config: DictConfig, overrides: list[str]) -> Iterator[str]:
    """Yield each value that a sweep gives a key, as an override; not those that a sweeper draws."""
    from_config = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    for override in parsed([*from_config, *overrides]):
        if override.is_discrete_sweep():
            yield from (f"{override.get_key_element()}={value}" for value in override.sweep_string_iterator())
