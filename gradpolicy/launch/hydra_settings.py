"""Checks Hydra's part of a config: it may not import, run or overwrite anything.

Hydra builds callbacks, log handlers, launchers and sweepers before the job begins. The names in their nodes
are compared with fixed lists before interpolation: a reference could have another value by the time Hydra
resolves it.
"""

import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf

from gradpolicy.errors import PolicyError, nearest, shown
from gradpolicy.imports import allowed_packages, lies_in
from gradpolicy.launch.allowed_targets import parsed

LAUNCHERS = (
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
)
SWEEPERS = ("hydra._internal.core_plugins.basic_sweeper.BasicSweeper",)
HANDLERS = ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler")
STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
# A shell runs these. Only the command line may set them, no file.
SHELL = ("setup", "python", "srun_args", "additional_parameters")
SEARCH_PATHS = ("pkg://gradpolicy.conf", "pkg://hydra", "pkg://hydra.conf")
VARIABLES = (
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_VISIBLE_DEVICES",
    "HYDRA_FULL_ERROR",
    "MKL_NUM_THREADS",
    "NCCL_DEBUG",
    "OMP_NUM_THREADS",
    "TOKENIZERS_PARALLELISM",
    "WANDB_MODE",
    "WANDB_SILENT",
)
OUTPUT = "${hydra.runtime.output_dir}/"
REFERENCE = re.compile(r"\$\{[\w.]+\}")


def check_search_path(directories: Sequence[Path], name: str) -> None:
    """Check the search path in the primary config file, before Hydra imports any of it.

    Args:
        directories: The directories that may hold the file.
        name: Its name.

    Raises:
        PolicyError: If it names a package or directory that is not listed.
    """
    for directory in directories:
        file = (directory / name).with_suffix(".yaml")
        content = _read(file) if file.is_file() else None
        hydra = content.get("hydra") if isinstance(content, Mapping) else None
        paths = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
        for path in [paths] if isinstance(paths, str) else paths or []:
            _check_listed(
                "hydra.searchpath", path, SEARCH_PATHS, "give it by --config-dir, or on the command line"
            )


def check_given_search_path(overrides: Sequence[str]) -> None:
    """Check the search path on the command line, which may name directories and allowed packages.

    Args:
        overrides: The command line's.

    Raises:
        PolicyError: If it names a package that is not allowed, since Hydra would import it.
    """
    for override in parsed(overrides):
        if override.key_or_group != "hydra.searchpath":
            continue
        value: Any = override.value()
        for path in value if isinstance(value, list) else [value]:
            package = str(path).removeprefix("pkg://")
            if str(path).startswith("file://") or lies_in(package, allowed_packages()):
                continue
            _check_listed("hydra.searchpath", path, SEARCH_PATHS, "a directory is given as file://…")


def check_hydra(config: DictConfig, overrides: Sequence[str]) -> None:
    """Check Hydra's part of a composed job.

    Args:
        config: The job, with the key ``hydra``.
        overrides: Those of the command line, which may set more than a file may.

    Raises:
        PolicyError: For the first setting that is not allowed.
    """
    node: Any = OmegaConf.to_container(config.hydra, resolve=False)
    given = {override.key_or_group for override in parsed(overrides)}
    for name, callback in _mapping("hydra.callbacks", node["callbacks"]).items():
        _check_built(f"hydra.callbacks.{name}", callback, ())
    _check_built("hydra.launcher", node["launcher"], LAUNCHERS)
    _check_built("hydra.sweeper", node["sweeper"], SWEEPERS)
    _check_shell(config, given)
    _check_sweep(node["sweeper"])
    for key in ("job_logging", "hydra_logging"):
        _check_logging(f"hydra.{key}", node[key])
    for name in _mapping("hydra.job.env_set", node["job"]["env_set"]):
        _check_listed("hydra.job.env_set", name, VARIABLES, "set it in your shell")
    name = str(config.hydra.job.name)
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise PolicyError(f"hydra.job.name: must be a plain name, for it names the log; got {shown(name)}")
    if node["output_subdir"] not in (None, ".hydra"):
        raise PolicyError(f"hydra.output_subdir: must be .hydra or null, got {shown(node['output_subdir'])}")


def check_launcher(config: DictConfig) -> None:
    """Check, before any job starts, that the launcher is installed and has what it needs.

    Args:
        config: A composed job, with Hydra's own part.

    Raises:
        PolicyError: If it is not, naming what to install or to choose instead.
    """
    choice, target = config.hydra.runtime.choices.get("hydra/launcher"), config.hydra.launcher._target_
    if not target.startswith("hydra_plugins."):
        return
    plugin = target.split(".")[1]
    if not _is_installed(plugin):
        raise PolicyError(
            f"hydra/launcher={choice}: needs {plugin.replace('_', '-')}: pip install 'gradpolicy[sweeps]'"
        )
    if target.endswith(".SlurmLauncher") and shutil.which("srun") is None:
        raise PolicyError(
            f"hydra/launcher={choice}: there is no srun here; start the sweep on a machine of the Slurm "
            "cluster, or run its jobs on this one by hydra/launcher=submitit_local"
        )


def _check_built(key: str, node: Any, listed: Sequence[str]) -> None:
    """Check that a node names one of a list, and that nothing below it is built."""
    target = _mapping(key, node).get("_target_")
    if not (isinstance(target, str) and lies_in(target, allowed_packages())):
        _check_listed(f"{key}._target_", target, listed, "others are not built")
    for path, value in _leaves(node):
        full_key = ".".join((key, *path))
        if path[-1] == "_target_" and len(path) > 1:
            raise PolicyError(f"{full_key}: nothing else is built there, got {shown(value)}")
        # A reference to a key gives a value of this config. A resolver could give something else each time.
        if isinstance(value, str) and "${" in REFERENCE.sub("", value):
            raise PolicyError(f"{full_key}: must be plain text, or refer to a key, got {shown(value)}")
        if REFERENCE.fullmatch(str(value)) and key.startswith("hydra.callbacks"):
            raise PolicyError(f"{full_key}: must not refer to anything, got {shown(value)}")


def _check_shell(config: DictConfig, given: set[str]) -> None:
    """Check that nothing in a file reaches the shell script by which a launcher starts jobs."""
    launcher: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    for name in SHELL:
        key = f"hydra.launcher.{name}"
        if launcher.get(name) and not any(each == key or each.startswith(f"{key}.") for each in given):
            raise PolicyError(f"{key}: reaches a shell, so no config may set it; give it on the command line")
    for path, value in _leaves(launcher):
        # In the script, what a job needs is written in comments, which a line break would end.
        if path[0] not in SHELL and isinstance(value, str) and not value.isprintable():
            raise PolicyError(
                f"hydra.launcher.{'.'.join(path)}: must be one line of text, got {shown(value)}"
            )


def _check_sweep(sweeper: Mapping[str, Any]) -> None:
    """Check that a config's own sweep sets nothing that only the command line may set."""
    for name in _mapping("hydra.sweeper.params", sweeper.get("params")):
        key = str(name).lstrip("+~")
        if key.startswith(("hydra.", "hydra/")) or key == "allowed_targets":
            raise PolicyError(f"hydra.sweeper.params: {key} can only be set on the command line")


def _check_logging(key: str, node: Any) -> None:
    """Check that logging goes to the terminal or into the run's directory, through Python's own handlers."""
    for path, value in _leaves(_mapping(key, node)):
        full_key = ".".join((key, *path))
        match path:
            case ("handlers", _, "class"):
                _check_listed(full_key, value, HANDLERS, "others are not built")
            case ("handlers", _, "filename"):
                _check_log_file(full_key, value)
            case ("handlers", _, "mode") if value != "a":
                raise PolicyError(f"{full_key}: must be a: a log is added to, got {shown(value)}")
            case ("handlers", _, "stream"):
                _check_listed(full_key, value, STREAMS, "others are not imported")
            case _:
                _check_plain(full_key, path, value)


def _check_plain(key: str, path: tuple[str, ...], value: Any) -> None:
    """Check a setting of Python's logging that is neither imported nor made."""
    if {"()", ".", "class"} & set(path):
        raise PolicyError(f"{key}: only handlers may be named, got {shown(value)}")
    if isinstance(value, str) and ("${" in value or "://" in value):
        raise PolicyError(f"{key}: must be plain text, got {shown(value)}")


def _check_log_file(key: str, value: Any) -> None:
    rest = str(value).removeprefix(OUTPUT).replace("${hydra.job.name}", "")
    if not str(value).startswith(OUTPUT) or not re.fullmatch(r"[\w-]*\.log", rest):
        raise PolicyError(f"{key}: must be a .log file in the run's directory, {OUTPUT}…, got {shown(value)}")


def _check_listed(key: str, value: Any, listed: Sequence[str], otherwise: str) -> None:
    if value not in listed:
        hints = [hint for hint in (nearest(str(value), listed), otherwise) if hint]
        raise PolicyError(f"{key}: {shown(value)} is not allowed; {'; '.join(hints)}")


def _mapping(key: str, node: Any) -> Mapping[str, Any]:
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        raise PolicyError(f"{key}: must be written out as a mapping, got {shown(node)}")
    return node


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value below a node that is no mapping or list, with its keys."""
    if isinstance(node, Mapping):
        for name, value in node.items():
            yield from _leaves(value, (*path, str(name)))
    elif isinstance(node, list | tuple):
        for index, value in enumerate(node):
            yield from _leaves(value, (*path, str(index)))
    else:
        yield path, node


def _read(file: Path) -> Any:
    try:
        return yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        # Hydra reads it next and says what is wrong with it.
        return None


def _is_installed(plugin: str) -> bool:
    """Return True if a plugin is installed; it is imported only when it launches."""
    try:
        distribution(plugin)
    except PackageNotFoundError:
        return False
    return True
