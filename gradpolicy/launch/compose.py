"""Composes the config of each job, with clear messages for what Hydra cannot compose."""

import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from hydra import compose, version
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from gradpolicy.errors import PolicyError, brief, nearest, shown
from gradpolicy.launch.allowed_targets import check_not_from_config, parsed
from gradpolicy.launch.config import check_config
from gradpolicy.launch.hydra_settings import check_given_search_path, check_hydra, check_search_path
from gradpolicy.launch.messages import LINE

VERSION_BASE = "1.3"
# What Hydra says of a key that it cannot set, add or take away.
WRONG_KEY = re.compile(r"Could not (?:override|delete(?: from config\.)?|append to config\b.*?) ?'([^'\s=]*)")
# The plugin's own config has the same name. `hydra/launcher=submitit_slurm` means this project's.
SAME_NAME = r"\s*'hydra/launcher/submitit_slurm' is validated against ConfigStore schema"
# Hydra only warns of a directory that does not exist.
NOT_FOUND = r"provider=hydra\.searchpath"


@dataclass(frozen=True)
class Source:
    """Where configs come from.

    Args:
        directory: The directory of configs.
        name: The config at its top.
        more: A second directory, from ``--config-dir``. If both hold a config of the same name, that in
            `directory` counts.
    """

    directory: Path
    name: str = "train"
    more: Path | None = None

    @property
    def directories(self) -> list[Path]:
        """Both directories, or the one there is."""
        return [self.directory] if self.more is None else [self.directory, self.more]


@contextmanager
def hydra_at(source: Source) -> Iterator[Hydra]:
    """Sets Hydra up for compositions and runs, and takes it down.

    Raises:
        PolicyError: If a directory does not exist.
    """
    for directory in source.directories:
        if not directory.is_dir():
            raise PolicyError(f"config directory {directory} does not exist")
    check_search_path(source.directories, source.name)
    version.setbase(VERSION_BASE)
    search_path = create_config_search_path(str(source.directory))
    if source.more is not None:
        # Before Hydra is set up, since it reads the search path once.
        search_path.prepend("command-line", f"file://{source.more}", SearchPathQuery(provider="schema"))
    former = HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", SAME_NAME)
        warnings.filterwarnings("error", NOT_FOUND)
        try:
            yield Hydra.create_main_hydra2("train", search_path)
        finally:
            GlobalHydra.instance().clear()
            HydraConfig.instance().cfg = former


def check_job(config: DictConfig, overrides: Sequence[str]) -> None:
    """Checks a composed job, including what Hydra itself would build for it. Builds nothing.

    Args:
        config: The job, with Hydra's part.
        overrides: Those of the command line, which may set more than a config may.

    Raises:
        PolicyError: For wrong input.
    """
    check_hydra(config, overrides)
    check_not_from_config(config, overrides)
    job = config.copy()
    with read_write(job), open_dict(job):
        del job["hydra"]
    check_config(job)


def compose_job(source: Source, overrides: list[str]) -> DictConfig:
    """Composes one job's config, Hydra's own part included; within :func:`hydra_at`.

    Raises:
        PolicyError: For a choice or key that does not exist, with the nearest ones that do.
    """
    for override in parsed(overrides):
        _check_override(override, source)
    check_given_search_path(overrides)
    try:
        config = compose(source.name, overrides, return_hydra_config=True)
    except MissingConfigException as error:
        raise _unknown_choice(error, source) from error
    except ConfigCompositionException as error:
        clearer = _wrong_key(error, source, overrides)
        if clearer is None:
            raise
        raise clearer from error
    except (HydraException, OmegaConfBaseException, yaml.YAMLError):
        raise
    except UserWarning as error:
        raise PolicyError(f"hydra.searchpath: {brief(str(error), most=LINE)}") from error
    except RecursionError as error:
        raise PolicyError("the command line cannot be composed: one of its configs holds itself") from error
    except Exception as error:
        # Hydra raises errors of any kind for strange input, such as a name that is too long for a file.
        key = re.search(r"full_key: (\S+)", str(error))
        if key is not None:
            raise PolicyError(f"{brief(key[1])}: there is nothing that could be set so") from error
        raise PolicyError(f"the command line cannot be composed: {brief(str(error), most=LINE)}") from error
    _check_choices(config, source, overrides)
    with read_write(config), open_dict(config):
        # Hydra sets it when a job starts. Until then the keys that refer to it need some directory.
        config.hydra.runtime.output_dir = str(Path.cwd())
    HydraConfig.instance().set_config(config)
    return config


def default_config() -> DictConfig | None:
    """The config of the job that runs as it would be without overrides; None where Hydra is not set up.

    A launcher that runs jobs in processes of its own does not set Hydra up there.
    """
    if not GlobalHydra.instance().is_initialized() or not HydraConfig.initialized():
        return None
    return compose(HydraConfig.get().job.config_name)


def fixed_overrides(overrides: list[str]) -> list[str]:
    """The overrides that do not sweep, which all jobs have in common."""
    return [
        line
        for line, override in zip(overrides, parsed(overrides), strict=True)
        if not override.is_sweep_override()
    ]


def jobs_of(config: DictConfig, overrides: list[str]) -> list[list[str]]:
    """Lists the overrides of each job of a sweep, as Hydra's own sweeper makes them.

    Returns:
        Nothing if they are not known beforehand: another sweeper draws values, from intervals for instance.
    """
    from_config = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    every = parsed([*from_config, *overrides])
    sweeps = [override for override in every if override.is_sweep_override()]
    if not config.hydra.sweeper._target_.endswith("BasicSweeper") or not all(
        override.is_discrete_sweep() for override in sweeps
    ):
        return []
    return BasicSweeper.split_arguments(every, max_batch_size=None)[0]


def _check_choices(config: DictConfig, source: Source, overrides: list[str]) -> None:
    """Refuses a chosen file that is no mapping: Hydra takes nothing from it, and says nothing.

    Raises:
        PolicyError: For the first.
    """
    # Hydra does not record the choice of several configs of a group.
    values = {override.key_or_group: override.value() for override in parsed(overrides)}
    several = {group: value for group, value in values.items() if isinstance(value, list)}
    for group, chosen in {**config.hydra.runtime.choices, **several}.items():
        for name in [chosen] if isinstance(chosen, str) else chosen or ():
            for file in (directory / group / f"{name}.yaml" for directory in source.directories):
                content = yaml.safe_load(file.read_text("utf-8")) if file.is_file() else None
                if content is not None and not isinstance(content, dict):
                    raise PolicyError(
                        f"{group}={name}: {file.name} must hold keys and values, not {shown(content)}"
                    )


# ---- clearer messages than Hydra gives


def _unknown_choice(error: MissingConfigException, source: Source) -> HydraException:
    """Adds the choices there are: Hydra names them for a single choice, not for a list."""
    group = str(error.missing_cfg_file or "").rpartition("/")[0]
    options = error.options or _choices(group, source)
    return MissingConfigException(str(error), error.missing_cfg_file, options)


def _choices(group: str, source: Source) -> list[str]:
    """The names of a group's configs, in every directory and package of the search path."""
    try:
        return GlobalHydra.instance().config_loader().get_group_options(group, config_name=source.name)
    except (OSError, ValueError):
        # A name that no directory can have, such as one that is too long.
        return []


def _check_override(override: Override, source: Source) -> None:
    """Refuses overrides for which Hydra has no clear message.

    Raises:
        PolicyError: For an override without a key, or a value that names no config of its group.
    """
    line, group = brief(str(override.input_line)), override.key_or_group
    if not group:
        raise PolicyError(f"{line}: names no key; write key=value")
    names = [] if override.is_sweep_override() else _choices(group, source)
    if not names:
        return
    value = override.value()
    given = value if isinstance(value, list) else [value]
    if isinstance(value, dict) or all(isinstance(name, str) for name in given):
        return
    if override.is_delete() and value is None:
        return
    hint = f"for nothing {group}=none" if value is None and "none" in names else nearest(str(value), names)
    raise PolicyError(f"{line}: a group takes the name of one of its configs; {hint}")


def _wrong_key(error: ConfigCompositionException, source: Source, overrides: list[str]) -> PolicyError | None:
    """Says which key does not exist, or cannot be set so; None where Hydra complains of something else."""
    found = WRONG_KEY.match(str(error))
    key = re.sub(r"^[+~]+", "", found.group(1)).rstrip(".") if found else ""
    if not key:
        return None
    if "An item is already at" in str(error):
        return PolicyError(f"{brief(key)}: is in the config; set it without a plus")
    if _choices(key, source) and not str(error).startswith("Could not delete"):
        return PolicyError(
            f"{brief(key)}: {source.name}.yaml has no such group in its defaults list: add `- {key}: null` "
            f"there, or write +{key}=…"
        )
    parent, missing = _deepest(_composable(source, overrides, key), key)
    siblings = list(map(str, parent)) if isinstance(parent, DictConfig) else []
    above = key[: -len(missing) - 1] if key != missing else ""
    name = missing.split(".")[0]
    if above.split(".")[0] == "user":
        return PolicyError(f"{brief(key)}: is not set in the config; add it by a plus: +{brief(key)}=…")
    given = brief(f"{above}.{name}".lstrip("."))
    if name in siblings:
        none = f"; for nothing {key}=none" if "none" in _choices(key, source) else ""
        return PolicyError(f"{given}: cannot be set or taken away beside the other overrides{none}")
    hint = nearest(name, set(siblings) - {"_target_", "_partial_", "hydra"})
    plus = f"; a new key takes a plus: +{brief(key)}=…" if "_target_" in siblings else ""
    return PolicyError(f"{given}: there is no such key; {hint}{plus}")


def _composable(source: Source, overrides: Iterable[str], key: str) -> DictConfig:
    """The config without the overrides near the one that does not compose, to see which keys there are."""
    near = ".".join(key.split(".")[:2])
    others = [
        line for line in overrides if not line.startswith("~") and not line.lstrip("+").startswith(near)
    ]
    try:
        return compose(source.name, others)
    except HydraException:
        return compose(source.name)


def _deepest(config: DictConfig, key: str) -> tuple[Any, str]:
    """The deepest node on the way to a key that exists, and the rest of the way."""
    node: Any = config
    *above, last = parts = key.replace("/", ".").split(".")
    for depth, part in enumerate(above):
        below = OmegaConf.select(node, part, throw_on_missing=False) if isinstance(node, DictConfig) else None
        if below is None or not OmegaConf.is_dict(below):
            return node, ".".join(parts[depth:])
        node = below
    return node, last
