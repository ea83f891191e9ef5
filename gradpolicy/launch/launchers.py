"""Can the launcher that a sweep asks for start anything here?"""

import importlib
import shutil
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from omegaconf import DictConfig

from gradpolicy.errors import PolicyError

_PLUGINS = "hydra_plugins"


def check_launcher(config: DictConfig) -> None:
    """Checks, before any job starts, that the launcher is installed and has what it needs.

    Args:
        config: A composed job, with Hydra's own part.

    Raises:
        PolicyError: If it is not, naming what to install or to choose instead.
    """
    choice, target = config.hydra.runtime.choices.get("hydra/launcher"), config.hydra.launcher._target_
    if not target.startswith(f"{_PLUGINS}."):
        return
    plugin = target.split(".")[1]
    launcher = _launcher_class(target)
    if launcher is None or not _is_installed(plugin):
        raise PolicyError(
            f"hydra/launcher={choice}: needs {plugin.replace('_', '-')}: pip install 'gradpolicy[sweeps]'"
        )
    if launcher.__name__ == "SlurmLauncher" and shutil.which("srun") is None:
        raise PolicyError(
            f"hydra/launcher={choice}: there is no srun here; start the sweep on a machine of the Slurm "
            "cluster, or run its jobs on this one by hydra/launcher=submitit_local"
        )


def _launcher_class(target: str) -> Any:
    module, _, name = target.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name, None)
    except ImportError:
        return None


def _is_installed(plugin: str) -> bool:
    """Whether the plugin's distribution is there; it imports what it runs on only when it launches."""
    try:
        distribution(plugin)
    except PackageNotFoundError:
        return False
    return True
