"""Settings that only the command line may set: allowed packages, and parts of Hydra's config.

A config may be untrusted. It cannot allow packages: the user names them on the command line, in a file beside
``train.py``, or in an environment variable. Nor may it make Hydra import, run or overwrite anything: Hydra
builds callbacks, log handlers, launchers and sweepers before the job starts. Their names are compared with
fixed lists before interpolation, since a reference could have another value when Hydra resolves it.
"""

import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf
from omegaconf._utils import get_yaml_loader

from gradpolicy.errors import PolicyError, nearest, shown
from gradpolicy.imports import allowed_packages, lies_in

KEY = "allowed_targets"
FILE = "allowed_targets.txt"
VARIABLE = "GRADPOLICY_ALLOWED_TARGETS"

LAUNCHERS = (
    "hydra._internal.core_plugins.basic_launcher.BasicLauncher",
    "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.LocalLauncher",
    "hydra_plugins.hydra_submitit_launcher.submitit_launcher.SlurmLauncher",
)
SWEEPERS = ("hydra._internal.core_plugins.basic_sweeper.BasicSweeper",)
# Settings of Python's logging that name objects, with the allowed values.
LOGGING = {
    "class": ("logging.StreamHandler", "logging.FileHandler", "logging.NullHandler"),
    "stream": ("ext://sys.stdout", "ext://sys.stderr"),
    "mode": ("a",),
}
LOG_FILE = re.compile(r"\$\{hydra\.runtime\.output_dir\}/([\w-]|\$\{hydra\.job\.name\})*\.log")
SEARCH_PATH = "hydra.searchpath"
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
# These are run by a shell. Only the command line may set them.
SHELL = ("setup", "python", "srun_args", "additional_parameters")
REFERENCE = re.compile(r"\$\{[\w.]+\}")


def parsed(overrides: Sequence[str]) -> list[Override]:
    """Parse the overrides of a command line."""
    return OverridesParser.create().parse_overrides(list(overrides))


# ---- packages


def trusted_packages(overrides: Sequence[str], beside: Path) -> tuple[str, ...]:
    """Return the packages that the user allows configs to name.

    Args:
        overrides: The overrides of the command line.
        beside: The directory of ``train.py``, which may have the file: one package per line, ``#`` for
            comments.

    Raises:
        PolicyError: If an entry is not the name of a package.
    """
    file = beside / FILE
    lines = file.read_text().splitlines() if file.is_file() else []
    named: dict[str, Iterable[Any]] = {
        KEY: _on_command_line(overrides),
        str(file): (line.partition("#")[0].strip() for line in lines),
        VARIABLE: (name.strip() for name in os.environ.get(VARIABLE, "").split(",")),
    }
    found = []
    for source, names in named.items():
        for name in (name for name in names if name != ""):
            if not isinstance(name, str) or not all(part.isidentifier() for part in name.split(".")):
                raise PolicyError(
                    f"{source}: must be names of packages, such as my_package; got {shown(name)}"
                )
            found.append(name)
    return tuple(dict.fromkeys(found))


def _on_command_line(overrides: Sequence[str]) -> list[Any]:
    values = [override.value() for override in parsed(overrides) if override.key_or_group == KEY]
    named: Any = values[-1] if values else []
    return list(named) if isinstance(named, list) else [named]


def check_not_from_config(config: DictConfig, overrides: Sequence[str]) -> None:
    """Check that no config file allows packages.

    Args:
        config: A composed job.
        overrides: Those of the command line, without those that a config adds for a sweep.

    Raises:
        PolicyError: If the job's list differs from that of the command line.
    """
    listed = OmegaConf.to_container(config, resolve=False).get(KEY) or []  # type: ignore[union-attr]
    listed = [listed] if isinstance(listed, str) else listed
    if listed != _on_command_line(overrides):
        raise PolicyError(
            f"{KEY}: a config cannot allow targets, only the person who runs it can: by {KEY}=[…] on the "
            f"command line, in {FILE} beside train.py, or by {VARIABLE}"
        )


# ---- the search path


def check_search_path(directories: Sequence[Path], name: str) -> None:
    """Check the search path in the primary config file, before Hydra imports any of it.

    Args:
        directories: The directories that may hold the file.
        name: Its name.

    Raises:
        PolicyError: If it names a package or directory that is not listed.
    """
    for directory in directories:
        try:
            content = content_of(directory / f"{name.removesuffix('.yaml')}.yaml")
        except (OSError, UnicodeDecodeError, yaml.YAMLError):
            # Hydra reads it next, and reports the error.
            continue
        hydra = content.get("hydra") if isinstance(content, Mapping) else None
        paths = hydra.get("searchpath") if isinstance(hydra, Mapping) else None
        for path in [paths] if isinstance(paths, str) else paths or []:
            _check_listed(SEARCH_PATH, path, SEARCH_PATHS, "give it by --config-dir, or on the command line")


def content_of(file: Path) -> Any:
    """Return the content of a config file, read by the loader that Hydra uses.

    PyYAML's own refuses a tag that this one reads, and makes dates of texts.
    """
    return yaml.load(file.read_text("utf-8"), Loader=get_yaml_loader())


def check_given_search_path(overrides: Sequence[str]) -> None:
    """Check the search path on the command line, which may name directories and allowed packages.

    Args:
        overrides: The overrides of the command line.

    Raises:
        PolicyError: If it names a package that is not allowed, which Hydra would import, or a directory that
            does not exist, of which Hydra only warns.
    """
    for override in parsed(overrides):
        value: Any = override.value() if override.key_or_group == SEARCH_PATH else []
        for path in value if isinstance(value, list) else [value]:
            package = str(path).removeprefix("pkg://")
            if str(path).startswith("file://"):
                if not Path(str(path).removeprefix("file://")).is_dir():
                    raise PolicyError(f"{SEARCH_PATH}: {path} does not exist")
            elif not lies_in(package, allowed_packages()):
                _check_listed(SEARCH_PATH, path, SEARCH_PATHS, "a directory is given as file://…")


# ---- Hydra's part of a job


def check_hydra(config: DictConfig, overrides: Sequence[str]) -> None:
    """Check Hydra's part of a composed job.

    Args:
        config: The job, with the key ``hydra``.
        overrides: Those of the command line, which may set more than a file may.

    Raises:
        PolicyError: For the first setting that is not allowed.
    """
    node: Any = OmegaConf.to_container(config.hydra, resolve=False)
    for name, callback in _mapping("hydra.callbacks", node["callbacks"]).items():
        _check_built(f"hydra.callbacks.{name}", callback, ())
    _check_built("hydra.launcher", node["launcher"], LAUNCHERS, REFERENCE)
    _check_built("hydra.sweeper", node["sweeper"], SWEEPERS, REFERENCE)
    _check_shell(config, {override.key_or_group for override in parsed(overrides)})
    for key in _mapping("hydra.sweeper.params", node["sweeper"].get("params")):
        if key.lstrip("+~").startswith(("hydra.", "hydra/", KEY)):
            raise PolicyError(f"hydra.sweeper.params: {key} can only be set on the command line")
    for part in ("job_logging", "hydra_logging"):
        for path, value in _leaves(_mapping(f"hydra.{part}", node[part])):
            _check_logging(".".join((f"hydra.{part}", *path)), path, value)
    for name in _mapping("hydra.job.env_set", node["job"]["env_set"]):
        _check_listed("hydra.job.env_set", name, VARIABLES, "set it in your shell")
    _check_listed("hydra.output_subdir", node["output_subdir"], (None, ".hydra"), "it is .hydra or null")
    name = str(config.hydra.job.name)
    if not re.fullmatch(r"[\w-][\w.-]*", name):
        raise PolicyError(f"hydra.job.name: must be a plain name, for it names the log; got {shown(name)}")


def check_launcher(config: DictConfig) -> None:
    """Check, before any job starts, that there is a cluster for a launcher that needs one.

    Args:
        config: A composed job, with Hydra's own part.

    Raises:
        PolicyError: If there is none; names an alternative.
    """
    if config.hydra.launcher._target_.endswith(".SlurmLauncher") and shutil.which("srun") is None:
        raise PolicyError(
            f"hydra/launcher={config.hydra.runtime.choices['hydra/launcher']}: there is no srun here; start "
            "the sweep on a machine of the Slurm cluster, or run its jobs on this one by "
            "hydra/launcher=submitit_local"
        )


def _check_built(key: str, node: Any, listed: Sequence[str], reference: re.Pattern | None = None) -> None:
    """Check that a node names a class of a list, and that nothing below it is built or resolved again.

    Args:
        key: Its key.
        node: The node.
        listed: The classes that it may name, in addition to those of allowed packages.
        reference: The allowed references. One to a key has a value of this config; a resolver could return
            another value each time.
    """
    target = _mapping(key, node).get("_target_")
    if not (isinstance(target, str) and lies_in(target, allowed_packages())):
        _check_listed(f"{key}._target_", target, listed, "others are not built")
    for path, value in _leaves(node):
        full_key = ".".join((key, *path))
        if path[-1] == "_target_" and len(path) > 1:
            raise PolicyError(f"{full_key}: nothing else is built there, got {shown(value)}")
        _check_plain(full_key, reference.sub("", value) if reference and isinstance(value, str) else value)


def _check_shell(config: DictConfig, given: set[str]) -> None:
    """Check that no setting of a file reaches the shell script that starts the jobs of a launcher."""
    launcher: Any = OmegaConf.to_container(config.hydra.launcher, resolve=True)
    for name in SHELL:
        key = f"hydra.launcher.{name}"
        if launcher.get(name) and not any(each == key or each.startswith(f"{key}.") for each in given):
            raise PolicyError(f"{key}: reaches a shell, so no config may set it; give it on the command line")
    for path, value in _leaves(launcher):
        # The script has a job's requirements in comments, which a line break would end.
        if path[0] not in SHELL and isinstance(value, str) and not value.isprintable():
            key = ".".join(("hydra.launcher", *path))
            raise PolicyError(f"{key}: must be one line of text, got {shown(value)}")


def _check_logging(key: str, path: tuple[str, ...], value: Any) -> None:
    """Check that logging goes to the terminal or into the run's directory, through Python's own handlers."""
    if path[0] == "handlers" and len(path) == 3 and path[2] in LOGGING:
        _check_listed(key, value, LOGGING[path[2]], "others are neither imported nor made")
    elif path[0] == "handlers" and path[2:] == ("filename",):
        if not LOG_FILE.fullmatch(str(value)):
            raise PolicyError(
                f"{key}: must be a .log file in the run's directory, ${{hydra.runtime.output_dir}}/…, "
                f"got {shown(value)}"
            )
    elif {"()", ".", "class"} & set(path):
        raise PolicyError(f"{key}: only handlers may be named, got {shown(value)}")
    else:
        _check_plain(key, value)


def _check_plain(key: str, value: Any) -> None:
    if isinstance(value, str) and ("${" in value or value.startswith(("ext://", "cfg://"))):
        raise PolicyError(f"{key}: must be plain text, got {shown(value)}")


def _check_listed(key: str, value: Any, listed: Sequence[str | None], otherwise: str) -> None:
    if value not in listed:
        hints = [hint for hint in (nearest(str(value), filter(None, listed)), otherwise) if hint]
        raise PolicyError(f"{key}: {shown(value)} is not allowed; {'; '.join(hints)}")


def _mapping(key: str, node: Any) -> Mapping[str, Any]:
    if node is None:
        return {}
    if not isinstance(node, Mapping):
        raise PolicyError(f"{key}: must be written out as a mapping, got {shown(node)}")
    return {str(name): value for name, value in node.items()}


def _leaves(node: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield every value below a node that is not a mapping or list, with its keys."""
    items = node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else None
    if items is None:
        yield path, node
    for name, value in items or ():
        yield from _leaves(value, (*path, str(name)))
