"""Which classes and functions a config may name: `_target_` must lie in an allowed package.

The check is made on the whole config before anything is instantiated, and on what a path really leads to:
`torch.os.system` begins with an allowed name but is not torch's.
"""

import importlib
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gradpolicy.errors import PolicyError, nearest

ALLOWED = ("gradpolicy", "torch", "lightning", "timm", "transformers", "torchmetrics")

# Within the allowed packages: what runs code out of files, strings or the network, writes files, or starts
# processes. A config that someone else wrote must not do that.
DENIED = (
    "lightning.app",
    "lightning.fabric.utilities.cloud_io",
    "lightning.fabric.utilities.consolidate_checkpoint",
    "lightning.pytorch.cli",
    "lightning.pytorch.utilities.migration",
    "torch.classes",
    "torch.distributed.elastic",
    "torch.distributed.launch",
    "torch.distributed.rpc",
    "torch.distributed.run",
    "torch.export.load",
    "torch.fx",
    "torch.hub",
    "torch.jit.load",
    "torch.load",
    "torch.multiprocessing",
    "torch.ops",
    "torch.package",
    "torch.save",
    "torch.serialization",
    "torch.testing",
    "torch.utils.benchmark",
    "torch.utils.bottleneck",
    "torch.utils.collect_env",
    "torch.utils.cpp_extension",
    "torch.utils.model_zoo",
)
DENIED_NAMES = ("load_from_checkpoint", "load_from_disk")

# What Hydra itself instantiates, under the key `hydra`.
HYDRAS_OWN = ("hydra._internal.core_plugins", "hydra.experimental.callbacks", "hydra_plugins")

EXTRAS = {"timm": "vision", "torchvision": "vision", "transformers": "transformers", "mlflow": "mlflow"}


def check_targets(config: Mapping[str, Any], allowed: Iterable[str] = ()) -> None:
    """Checks every `_target_` of a resolved config.

    Args:
        config: The config, with or without the key `hydra`.
        allowed: Packages that are allowed beside :data:`ALLOWED`.

    Raises:
        PolicyError: If one lies outside the allowed packages, is denied, or does not exist.
    """
    packages = (*ALLOWED, *allowed)
    for key, path in targets_of(config):
        if key.startswith("hydra.") and _lies_in(path, HYDRAS_OWN):
            continue
        locate_target(key, path, packages)


def targets_of(config: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Lists every `_target_` of a config with its key."""
    if isinstance(config, Mapping):
        for name, value in config.items():
            below = f"{key}.{name}" if key else str(name)
            if name == "_target_":
                yield below, value
            else:
                yield from targets_of(value, below)
    elif isinstance(config, list | tuple):
        for index, value in enumerate(config):
            yield from targets_of(value, f"{key}[{index}]")


def locate_target(key: str, path: Any, packages: Iterable[str] = ALLOWED) -> Any:
    """Finds what a `_target_` names.

    Args:
        key: Where it stands in the config, for the message.
        path: The dotted path.
        packages: The packages it may lie in.

    Raises:
        PolicyError: If it may not be named, or does not exist.
    """
    packages = tuple(packages)
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise PolicyError(f"{key}: must be a dotted path to a class or function, got {path!r}")
    if not _lies_in(path, packages):
        raise PolicyError(
            f"{key}: {path!r} lies outside the allowed packages {', '.join(packages)}; "
            f"allow its package by allowed_targets=[{path.split('.')[0]}] if you trust it"
        )
    user_packages = tuple(package for package in packages if package not in ALLOWED)
    if _lies_in(path, user_packages):
        return _walk(key, path)
    _refuse_denied(key, path, path)
    found = _walk(key, path, packages)
    home = _home(found)
    if home and not _lies_in(home, packages):
        raise PolicyError(f"{key}: {path!r} is really {home!r}, which lies outside the allowed packages")
    if home:
        _refuse_denied(key, path, home)
    return found


def _refuse_denied(key: str, path: str, real: str) -> None:
    parts = path.split(".")
    private = any(part.startswith("_") for part in parts)
    if private or parts[-1] in DENIED_NAMES or _lies_in(path, DENIED) or _lies_in(real, DENIED):
        raise PolicyError(f"{key}: {path!r} is not allowed: it can run code, or read or write any file")


def _walk(key: str, path: str, packages: tuple[str, ...] | None = None) -> Any:
    """Follows a dotted path; with packages, never through a module that lies outside them."""
    parts = path.split(".")
    found: Any = _imported(key, path, parts[0])
    for depth, part in enumerate(parts[1:], start=1):
        here = ".".join(parts[:depth])
        if not hasattr(found, part) and isinstance(found, types.ModuleType):
            _try_import(key, path, f"{here}.{part}")
        if not hasattr(found, part):
            names = [name for name in dir(found) if not name.startswith("_")]
            raise PolicyError(f"{key}: {here!r} has no {part!r}; {nearest(part, names)}")
        found = getattr(found, part)
        if packages and isinstance(found, types.ModuleType) and not _lies_in(found.__name__, packages):
            raise PolicyError(
                f"{key}: {path!r} goes through {found.__name__!r}, which lies outside the allowed packages"
            )
    if not callable(found):
        raise PolicyError(f"{key}: {path!r} is a {type(found).__name__}, not a class or function")
    return found


def _imported(key: str, path: str, module: str) -> types.ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise _cannot_import(key, path, error) from error


def _try_import(key: str, path: str, module: str) -> None:
    """Imports a submodule if there is one; one that fails while it is imported is an error."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise _cannot_import(key, path, error) from error
    except ImportError as error:
        raise _cannot_import(key, path, error) from error


def _cannot_import(key: str, path: str, error: ImportError) -> PolicyError:
    missing = str(error.name or "").split(".")[0]
    extra = EXTRAS.get(missing)
    hint = f"; install it: pip install 'gradpolicy[{extra}]'" if extra else ""
    return PolicyError(f"{key}: {path!r} cannot be imported: {error}{hint}")


def _home(found: Any) -> str | None:
    """Where an object was defined; None where it does not say."""
    module = getattr(found, "__module__", None)
    return f"{module}.{getattr(found, '__qualname__', '')}" if isinstance(module, str) else None


def _lies_in(path: str, packages: Iterable[str]) -> bool:
    return any(path == package or path.startswith(f"{package}.") for package in packages)
