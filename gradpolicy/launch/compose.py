"""Composes the config of each job by Hydra, with clear messages."""

import warnings
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
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
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gradpolicy.errors import PolicyError, brief, nearest, shown
from gradpolicy.launch.config import Settings, check_config
from gradpolicy.launch.messages import one_line
from gradpolicy.launch.permissions import (
    check_given_search_path,
    check_hydra,
    check_not_from_config,
    check_search_path,
    parsed,
)

VERSION_BASE = "1.3"
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
    """Set Hydra up for compositions and runs, and take it down.

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


def check_job(config: DictConfig, overrides: Sequence[str]) -> Settings:
    """Check a composed job, including what Hydra itself would build for it; build nothing.

    Args:
        config: The job, with Hydra's part.
        overrides: Those of the command line, which may set more than a config may.

    Returns:
        The job's part, resolved.

    Raises:
        PolicyError: For wrong input.
    """
    check_hydra(config, overrides)
    check_not_from_config(config, overrides)
    job = config.copy()
    with read_write(job), open_dict(job):
        del job["hydra"]
    settings = check_config(job)
    if settings.paths.output_dir != config.hydra.runtime.output_dir:
        raise PolicyError("paths.output_dir: is the directory of the run; name it by hydra.run.dir=…")
    return settings


def compose_job(source: Source, overrides: list[str]) -> DictConfig:
    """Compose one job's config, Hydra's own part included; within :func:`hydra_at`.

    Raises:
        PolicyError: For a choice or key that does not exist, with the nearest ones that do, and for whatever
            else Hydra cannot compose.
    """
    for override in parsed(overrides):
        if not override.key_or_group:
            raise PolicyError(f"{brief(str(override.input_line))}: names no key; write key=value")
    check_given_search_path(overrides)
    try:
        config = compose(source.name, overrides, return_hydra_config=True)
    except Exception as error:
        # Hydra raises errors of any kind for strange input, such as a name that is too long for a file.
        raise _explained(error, source, overrides) from error
    _check_choices(config, source, overrides)
    with read_write(config), open_dict(config):
        # Hydra sets it when a job starts. Until then the keys that refer to it need some directory.
        config.hydra.runtime.output_dir = str(Path.cwd())
    HydraConfig.instance().set_config(config)
    return config


def default_config() -> DictConfig | None:
    """Return the running job's config without overrides; None where Hydra is not set up.

    A launcher that runs jobs in processes of its own does not set Hydra up there.
    """
    if not GlobalHydra.instance().is_initialized() or not HydraConfig.initialized():
        return None
    return compose(HydraConfig.get().job.config_name)


def fixed_overrides(overrides: list[str]) -> list[str]:
    """Return the overrides that do not sweep, which all jobs have in common."""
    return [
        line
        for line, override in zip(overrides, parsed(overrides), strict=True)
        if not override.is_sweep_override()
    ]


def jobs_of(config: DictConfig, overrides: list[str]) -> list[list[str]]:
    """List the overrides of each job of a sweep, as Hydra's own sweeper makes them.

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
    """Refuse a chosen file that is no mapping: Hydra takes nothing from it, and says nothing.

    Raises:
        PolicyError: For the first.
    """
    # Hydra does not record the choice of several configs of a group.
    values = {override.key_or_group: override.value() for override in parsed(overrides)}
    several = {group: value for group, value in values.items() if isinstance(value, list)}
    for group, chosen in {**config.hydra.runtime.choices, **several}.items():
        names = [chosen] if isinstance(chosen, str) else chosen or ()
        known = _choices(group, source)
        for name in (name for name in names if name in known):
            for file in (directory / group / f"{name}.yaml" for directory in source.directories):
                content = yaml.safe_load(file.read_text("utf-8")) if file.is_file() else None
                if content is not None and not isinstance(content, dict):
                    raise PolicyError(
                        f"{group}={name}: {file.name} must hold keys and values, not {shown(content)}"
                    )


# ---- what is wrong with a command line


def _explained(error: Exception, source: Source, overrides: Sequence[str]) -> PolicyError:
    """Return Hydra's message under the key of the first override that does not compose, with near names."""
    # Choices of groups first: they decide which keys there are.
    ordered = sorted(parsed(overrides), key=lambda override: not _choices(override.key_or_group, source))

    @cache
    def composed(count: int) -> DictConfig | Exception:
        try:
            lines = [str(override.input_line) for override in ordered[:count]]
            return compose(source.name, lines, return_hydra_config=True)
        except Exception as found:
            return found

    count = bisect_left(range(len(ordered)), True, key=lambda count: isinstance(composed(count), Exception))
    before = composed(count - 1) if count else error
    if isinstance(before, Exception):
        return PolicyError(one_line(error))
    override, last = ordered[count - 1], composed(count)
    key = override.key_or_group
    names = _choices(key, source)
    if names and not override.is_delete():
        value: Any = override.value()
        wrong = [name for name in (value if isinstance(value, list) else [value]) if name not in names]
        if wrong:
            name = "null" if wrong[0] is None else str(wrong[0])
            return PolicyError(f"{brief(f'{key}={name}')}: there is no such {key}; {nearest(name, names)}")
    missing = _missing_key(before, key)
    if missing is not None and not names:
        plus = "" if override.is_delete() else f"; a new key takes a plus: +{brief(key)}=…"
        return PolicyError(f"{missing}{plus}")
    none = f"; for nothing {key}=none" if override.is_delete() and "none" in names else ""
    return PolicyError(f"{brief(key)}: {one_line(last if isinstance(last, Exception) else error)}{none}")


def _choices(group: str, source: Source) -> list[str]:
    """Return the names of a group's configs, in every directory and package of the search path."""
    try:
        return GlobalHydra.instance().config_loader().get_group_options(group, config_name=source.name)
    except (OSError, ValueError):
        # A name that no directory can have, such as one that is too long.
        return []


def _missing_key(config: DictConfig, key: str) -> str | None:
    """Say which part of a key a config does not have, with the nearest that it has; None if it has all."""
    node: Any = config
    parts = key.replace("/", ".").split(".")
    for depth, part in enumerate(parts):
        known = [str(name) for name in node] if OmegaConf.is_dict(node) else []
        if part not in known:
            hint = nearest(part, set(known) - {"_target_", "_partial_", "hydra"})
            return f"{brief('.'.join(parts[: depth + 1]))}: there is no such key; {hint}".rstrip("; ")
        node = OmegaConf.select(node, part, throw_on_missing=False)
    return None
