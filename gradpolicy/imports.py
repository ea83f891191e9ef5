"""Import the object that a dotted path names.

In Python code any importable module may be named. A program that runs configs of other people restricts this
by :func:`limited_to`: a path must then lead to an object of a known or allowed package, and not to a module
that such a package imports.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gradpolicy.errors import PolicyError, brief, nearest, shown

# The packages that a path may lead to. Importing them has no side effects.
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

_allowed: tuple[str, ...] | None = None


@contextmanager
def limited_to(packages: Iterable[str]) -> Iterator[None]:
    """Restrict paths to the known packages and these within the block.

    Args:
        packages: The packages that the user has allowed.
    """
    global _allowed
    former, _allowed = _allowed, tuple(packages)
    try:
        yield
    finally:
        _allowed = former


def is_limited() -> bool:
    """Return True within a block of :func:`limited_to`."""
    return _allowed is not None


def allowed_packages() -> tuple[str, ...]:
    """Return the packages that the user has allowed."""
    return _allowed or ()


def is_allowed(found: object) -> bool:
    """Return True if an object was defined in an allowed package."""
    home = home_of(found)
    return home is not None and lies_in(home, allowed_packages())


def import_by_name(path: str) -> Any:
    """Return the object at a dotted path.

    Args:
        path: A path such as ``"my_package.my_rules.five_times"``.

    Raises:
        PolicyError: If there is none, or its package is not allowed.
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
    """Return a clause with the missing package and the command to install it.

    Example:
        >>> to_install(ModuleNotFoundError("No module named 'optuna'", name="optuna"))
        "needs optuna, which is not installed: pip install 'gradpolicy[sweeps]'"
    """
    # Lightning raises it without a name, but its message contains the name.
    said = error.name or str(error)
    package = next((name for name in EXTRAS if name in said), (error.name or "").split(".")[0])
    if not package:
        return brief(said, most=200)
    install = f"'gradpolicy[{EXTRAS[package]}]'" if package in EXTRAS else package
    return f"needs {package}, which is not installed: pip install {install}"


def not_allowed(path: str) -> PolicyError:
    """Return the error for a path into a package that is not allowed."""
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
    """Return True if a dotted path is one of these packages, or within one."""
    return any(path == package or path.startswith(f"{package}.") for package in packages)


def follow(path: str, packages: tuple[str, ...] | None = None) -> Any:
    """Import the object at a dotted path.

    Args:
        path: The dotted path.
        packages: The packages that it may lead through; None: any.

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
    """Import a submodule if it exists; an exception during its import is an error."""
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
