"""Composes and checks a config, also each job of a sweep, before Hydra makes any directory."""

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra._internal.hydra import Hydra
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from gradpolicy.errors import PolicyError, nearest
from gradpolicy.launch.hydra_nodes import check_hydra, check_search_path
from gradpolicy.launch.schema import Settings, read_settings
from gradpolicy.launch.signatures import argument_names, check_arguments
from gradpolicy.launch.targets import check_targets, locate_target
from gradpolicy.launch.trust import check_not_from_config

VERSION_BASE = "1.3"
WHEN = "gradpolicy.When"
# Lightning takes less: it divides by the one, and with a negative norm turns gradients round.
TRAINER_LEAST = {"accumulate_grad_batches": 1, "gradient_clip_val": 0}
# The plugin's own config has that name, so that `hydra/launcher=submitit_slurm` means this project's.
NAMESAKE = r"\s*'hydra/launcher/submitit_slurm' is validated against ConfigStore schema"


@dataclass(frozen=True)
class Source:
    """Where configs come from.

    Args:
        directory: The directory of configs.
        name: The config at its top.
        more: A further directory, as ``--config-dir`` names it, that comes first.
    """

    directory: Path
    name: str = "train"
    more: Path | None = None


@contextmanager
def hydra_at(source: Source) -> Iterator[Hydra]:
    """Sets Hydra up for compositions and runs, and takes it down.

    Raises:
        PolicyError: If a directory does not exist.
    """
    for directory in filter(None, (source.directory, source.more)):
        if not directory.is_dir():
            raise PolicyError(f"config directory {directory} does not exist")
    check_search_path([directory for directory in (source.directory, source.more) if directory], source.name)
    former = HydraConfig.instance().cfg
    GlobalHydra.instance().clear()
    with (
        warnings.catch_warnings(),
        initialize_config_dir(str(source.directory), job_name="train", version_base=VERSION_BASE),
    ):
        warnings.filterwarnings("ignore", NAMESAKE)
        hydra = GlobalHydra.instance().hydra
        assert hydra is not None
        if source.more is not None:
            path, anchor = f"file://{source.more}", SearchPathQuery(provider="schema")
            hydra.config_loader.get_search_path().prepend("command-line", path, anchor)
        try:
            yield hydra
        finally:
            HydraConfig.instance().cfg = former


def check_job(config: DictConfig, overrides: Sequence[str]) -> None:
    """Checks a composed job, with what Hydra itself would instantiate for it; makes nothing.

    Args:
        config: The job, with Hydra's part.
        overrides: The command line's, which may say what no config may.

    Raises:
        PolicyError: For wrong input.
    """
    check_hydra(config, overrides)
    check_not_from_config(config, overrides)
    check_config(_without_hydra(config))


def compose_job(source: Source, overrides: list[str]) -> DictConfig:
    """Composes one job's config, Hydra's own part included; within :func:`hydra_at`.

    Raises:
        PolicyError: For a choice or key that does not exist, with the nearest ones that do.
    """
    try:
        config = compose(source.name, overrides, return_hydra_config=True)
    except MissingConfigException as error:
        raise _unknown_choice(error, source) from error
    except ConfigCompositionException as error:
        raise _unknown_key(error, source.name, overrides) from error
    except ValueError as error:
        raise _no_choice(error, source, overrides) from error
    with read_write(config), open_dict(config):
        # Hydra sets it when a job starts; until then any directory will do for what refers to it.
        config.hydra.runtime.output_dir = str(Path.cwd())
    HydraConfig.instance().set_config(config)
    return config


def fixed_overrides(overrides: list[str]) -> list[str]:
    """The overrides that do not sweep: what all jobs have in common."""
    parsed = OverridesParser.create().parse_overrides(overrides)
    return [
        line for line, override in zip(overrides, parsed, strict=True) if not override.is_sweep_override()
    ]


def jobs_of(config: DictConfig, overrides: list[str]) -> list[list[str]]:
    """Lists the overrides of each job of a sweep, as Hydra's own sweeper makes them.

    Sweeps that other sweepers draw, from intervals for instance, are not known beforehand: none is listed.
    """
    parser = OverridesParser.create()
    if not config.hydra.sweeper._target_.endswith("BasicSweeper"):
        return []
    from_config = [f"{key}={value}" for key, value in (config.hydra.sweeper.params or {}).items()]
    every = parser.parse_overrides([*from_config, *overrides])
    if not all(override.is_discrete_sweep() for override in every if override.is_sweep_override()):
        return []
    return BasicSweeper.split_arguments(every, max_batch_size=None)[0]


def check_config(config: DictConfig) -> Settings:
    """Checks a job's config: references, keys, types, targets and their arguments.

    Raises:
        PolicyError: For wrong input.
    """
    container = resolved(config)
    settings = read_settings(container)
    if not (settings.train or settings.test or settings.plan_only):
        raise PolicyError("train=false test=false leaves nothing to do; plan_only=true prints the plan")
    groups = {key: value for key, value in container.items() if isinstance(value, dict)}
    # The optimizer first: the model refers to it, and a message should name the key that a person set.
    groups = {key: groups[key] for key in sorted(groups, key=lambda key: key == "model")}
    for name, node in (settings.policy or {}).items():
        if node is not None and "_target_" not in node:
            raise PolicyError(f"policy.{name}: needs a _target_, such as gradpolicy.Freeze")
    for name, least in TRAINER_LEAST.items():
        given = settings.trainer.get(name)
        if isinstance(given, int | float) and given < least:
            raise PolicyError(f"trainer.{name}: {given} given, at least {least} needed")
    check_targets(groups)
    check_arguments(groups)
    return settings


def resolved(config: DictConfig) -> dict[str, Any]:
    """Gives a config as plain containers, every reference in it followed.

    A search space is left as it is: it is written for other programs. A policy's `when` may be written
    without its `_target_`.
    """
    plain = OmegaConf.create({key: config._get_node(key) for key in config if key != "sweep"})
    container = OmegaConf.to_container(plain, resolve=True, throw_on_missing=True)
    assert isinstance(container, dict)
    for node in (container.get("policy") or {}).values():
        when = node.get("when") if isinstance(node, dict) else None
        if isinstance(when, dict):
            when.setdefault("_target_", WHEN)
    return {str(key): value for key, value in container.items()}


def _without_hydra(config: DictConfig) -> DictConfig:
    job = config.copy()
    with read_write(job), open_dict(job):
        del job["hydra"]
    return job


# ---- what Hydra says too little about


def _unknown_choice(error: MissingConfigException, source: Source) -> HydraException:
    """Adds the choices there are: Hydra names them for a single choice, not for a list."""
    group = str(error.missing_cfg_file or "").rpartition("/")[0]
    directories = filter(None, (source.directory, source.more))
    options = error.options or [
        path.stem for directory in directories for path in sorted((directory / group).glob("*.yaml"))
    ]
    return MissingConfigException(str(error), error.missing_cfg_file, options)


def _no_choice(error: ValueError, source: Source, overrides: Iterable[str]) -> ValueError:
    """Says what to choose instead: Hydra takes no `null` for a group."""
    for line in overrides:
        group, _, value = line.partition("=")
        if value == "null" and (source.directory / group).is_dir():
            names = [path.stem for path in (source.directory / group).glob("*.yaml")]
            hint = f"for nothing {group}=none" if "none" in names else nearest(value, names)
            return PolicyError(f"{line}: a group takes the name of one of its configs; {hint}")
    return error


def _unknown_key(error: ConfigCompositionException, config_name: str, overrides: list[str]) -> Exception:
    found = re.match(r"Could not (?:override|delete|append to config\b.*) ?'?([^'\s]*)'?", str(error))
    key = re.sub(r"^[+~]+", "", found.group(1)).rstrip(".") if found else ""
    if not key or "already at" in str(error):
        return error
    config = _composable(config_name, overrides, key)
    parent, missing = _deepest(config, key)
    siblings = list(parent.keys()) if isinstance(parent, DictConfig) else []
    above = key[: -len(missing) - 1] if key != missing else ""
    name = missing.split(".")[0]
    arguments = _arguments(parent)
    if name in arguments or above.split(".")[0] == "user":
        return PolicyError(f"{key}: is not set in the config; add it by a plus: +{key}=…")
    hint = nearest(name, {*map(str, siblings), *arguments} - {"_target_", "_partial_", "hydra"})
    return PolicyError(f"{above + '.' if above else ''}{name}: there is no such key; {hint}")


def _composable(config_name: str, overrides: Iterable[str], key: str) -> DictConfig:
    """The config without the overrides near the one that does not compose, to see which keys there are."""
    near = ".".join(key.split(".")[:2])
    others = [line for line in overrides if not line.lstrip("+~").startswith(near)]
    try:
        return compose(config_name, others)
    except HydraException:
        return compose(config_name)


def _deepest(config: DictConfig, key: str) -> tuple[Any, str]:
    """The deepest node on the way to a key that exists, and the rest of the way."""
    node: Any = config
    parts = key.replace("/", ".").split(".")
    for depth, part in enumerate(parts):
        below = OmegaConf.select(node, part, throw_on_missing=False) if isinstance(node, DictConfig) else None
        if below is None or not OmegaConf.is_dict(below):
            return node, ".".join(parts[depth:])
        node = below
    return node, parts[-1]


def _arguments(node: Any) -> Mapping[str, Any]:
    """The arguments that a node's `_target_` takes."""
    path = node.get("_target_") if isinstance(node, DictConfig) else None
    if not isinstance(path, str):
        return {}
    try:
        return argument_names(locate_target("", node))[0]
    except PolicyError:
        return {}
