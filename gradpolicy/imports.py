"""Import the object that a dotted path names."""

import importlib
from types import ModuleType
from typing import Any

from gradpolicy.errors import PolicyError, brief, nearest, shown

# The extra that installs an optional package.
EXTRAS = {
    "hydra_plugins": "sweeps",
    "mlflow": "mlflow",
    "optuna": "sweeps",
    "tensorboard": "tensorboard",
    "timm": "vision",
    "torchvision": "vision",
    "transformers": "transformers",
}


def import_by_name(path: str) -> Any:
    """Return the object at a dotted path.

    Args:
        path: A path such as ``"my_package.my_rules.five_times"``.

    Raises:
        PolicyError: If there is none.
    """
    if not all(part.isidentifier() for part in path.split(".")):
        raise PolicyError(f"{shown(path)} is no dotted path")
    here, *parts = path.split(".")
    found: Any = _module(path, here)
    for part in parts:
        below = f"{here}.{part}"
        if not hasattr(found, part) and isinstance(found, ModuleType):
            _module(path, below, optional=True)
        if not hasattr(found, part):
            hint = nearest(part, (name for name in dir(found) if not name.startswith("_")))
            message = f"{shown(path)} cannot be imported: {here!r} has no {part!r}; {hint}"
            raise PolicyError(message.rstrip("; "))
        found, here = getattr(found, part), below
    return found


def to_install(error: ModuleNotFoundError) -> str:
    """Return a clause with the missing package, and the command to install it if an extra does.

    Example:
        >>> to_install(ModuleNotFoundError("No module named 'optuna'", name="optuna"))
        "needs optuna, which is not installed: pip install 'gradpolicy[sweeps]'"
    """
    # Lightning raises it without a name, but its message contains the name.
    said = error.name or str(error)
    package = next((name for name in EXTRAS if name in said), (error.name or "").split(".")[0])
    if not package:
        return brief(said, most=200)
    install = f": pip install 'gradpolicy[{EXTRAS[package]}]'" if package in EXTRAS else ""
    return f"needs {brief(package)}, which is not installed{install}"


def _module(path: str, name: str, *, optional: bool = False) -> Any:
    """Import a module on a path; an exception during its import is an error, its absence may be none."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        reason = to_install(error) if isinstance(error, ModuleNotFoundError) else error
        if not (optional and error.name == name):
            raise PolicyError(f"{shown(path)} cannot be imported: {reason}") from error
