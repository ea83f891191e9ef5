"""Import the object that a dotted path names.

In a person's own code any importable module may be named. A program that runs configs of others limits this
with :func:`limited_to`: a path then leads only to what the packages hold that are known or allowed, whatever
other modules they happen to import.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gradpolicy.errors import PolicyError, brief, nearest, shown

# The packages whose modules a path may be followed through. Importing any of them does nothing else.
KNOWN = (
    "gradpolicy",
    "lightning.fabric",
    "lightning.pytorch",
    "timm",
    "torch.nn",
    "torch.optim",
    "torchmetrics",
    "transformers",
)
# The extra that installs a package which is imported only where it is used.
EXTRAS = {
    "hydra_plugins": "sweeps",
    "mlflow": "mlflow",
    "optuna": "sweeps",
    "tensorboard": "tensorboard",
    "timm": "vision",
    "torchvision": "vision",
    "transformers": "transformers",
}

_allowed: tuple[str, ...] | None = None


@contextmanager
def limited_to(packages: Iterable[str]) -> Iterator[None]:
    """Limit paths to the known packages and these, for as long as the block lasts.

    Args:
        packages: What the person who runs the program has allowed.
    """
    global _allowed
    former, _allowed = _allowed, tuple(packages)
    try:
        yield
    finally:
        _allowed = former


def is_limited() -> bool:
    """Return True if paths come from configs that somebody else may have written."""
    return _allowed is not None


def allowed_packages() -> tuple[str, ...]:
    """Return the packages that the person has allowed."""
    return _allowed or ()


def is_allowed(found: object) -> bool:
    """Return True if an object was defined in an allowed package, whatever path led to it."""
    home = home_of(found)
    return home is not None and lies_in(home, allowed_packages())


def import_by_name(path: str) -> Any:
    """Find the object at a dotted path.

    Args:
        path: Such as ``"my_package.my_rules.five_times"``.

    Raises:
        PolicyError: If there is none, or it lies in a package that may not be named here.
    """
    if not all(part.isidentifier() for part in path.split(".")):
        raise PolicyError(f"{shown(path)} is no dotted path")
    if not is_limited():
        return follow(path)
    packages = (*KNOWN, *allowed_packages())
    if not lies_in(path, packages):
        raise not_allowed(path)
    return follow(path, packages)


def to_install(error: ModuleNotFoundError) -> str:
    """Say which package is missing, and how to install it.

    Example:
        >>> to_install(ModuleNotFoundError("No module named 'optuna'", name="optuna"))
        "needs optuna, which is not installed: pip install 'gradpolicy[sweeps]'"
    """
    # Lightning raises it without a name, and with a sentence that holds the package's.
    said = error.name or str(error)
    package = next((name for name in EXTRAS if name in said), (error.name or "").split(".")[0])
    if not package:
        return brief(said, most=200)
    install = f"'gradpolicy[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"needs {package}, which is not installed: pip install {install}"


def not_allowed(path: str) -> PolicyError:
    """Return the error for a path into a package that nobody has allowed."""
    package = path.split(".")[0]
    return PolicyError(
        f"{shown(path)} is not allowed; if you trust the package, allow it on the command line: "
        f"allowed_targets=[{package}]"
    )


def home_of(found: object) -> str | None:
    """Return the dotted path at which a class or function was defined, if it is known."""
    module = getattr(found, "__module__", None)
    return f"{module}.{getattr(found, '__qualname__', '')}" if isinstance(module, str) else None


def lies_in(path: str, packages: Iterable[str]) -> bool:
    """Return True if a dotted path is, or begins with, one of these packages."""
    return any(path == package or path.startswith(f"{package}.") for package in packages)


def follow(path: str, packages: tuple[str, ...] | None = None) -> Any:
    """Follow a path from its first module on.

    Args:
        path: The dotted path.
        packages: It never goes through a module outside of these; None: it may go anywhere.

    Raises:
        PolicyError: If there is no such object, or the path leads to another package.
    """
    first, *parts = path.split(".")
    found: Any = _imported(path, first)
    here = first
    for part in parts:
        below = f"{here}.{part}"
        if part.startswith("_") and packages is not None and not lies_in(below, allowed_packages()):
            raise PolicyError(f"{shown(path)} is not allowed: {part!r} is private")
        if not hasattr(found, part) and isinstance(found, ModuleType) and _may_import(below, packages):
            _import_if_there(path, below)
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            hint = nearest(part, names)
            raise PolicyError(
                f"{shown(path)} cannot be imported: {here!r} has no {part!r}; {hint}".rstrip("; ")
            )
        found = getattr(found, part)
        if isinstance(found, ModuleType) and packages is not None and not _may_pass(found, packages):
            raise PolicyError(f"{shown(path)} is not allowed: it goes through the module {found.__name__!r}")
        here = below
    return found


def _may_import(module: str, packages: tuple[str, ...] | None) -> bool:
    return packages is None or lies_in(module, packages) or _lies_above(module, packages)


def _may_pass(module: ModuleType, packages: tuple[str, ...]) -> bool:
    return lies_in(module.__name__, packages) or _lies_above(module.__name__, packages)


def _lies_above(module: str, packages: Iterable[str]) -> bool:
    return any(package.startswith(f"{module}.") for package in packages)


def _imported(path: str, module: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _cannot_import(path, error) from error


def _import_if_there(path: str, module: str) -> None:
    """Import a submodule if there is one; one that fails while it is imported is an error."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise _cannot_import(path, error) from error
    except ImportError as error:
        raise _cannot_import(path, error) from error


def _cannot_import(path: str, error: ImportError) -> PolicyError:
    reason = to_install(error) if isinstance(error, ModuleNotFoundError) else error
    return PolicyError(f"{shown(path)} cannot be imported: {reason}")
