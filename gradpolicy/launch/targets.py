"""Finds and builds the objects that a config names, and refuses forbidden ones.

Every `_target_` of the resolved config is followed to its object. The object must be a class of the kind that
:mod:`gradpolicy.launch.kinds` lists for its key, a function listed there, or be defined in a package that
the person who runs the program has allowed. It is compared by identity, not by its name.

Then :func:`hydra.utils.instantiate` builds it, given the checked objects themselves as ``_target_``, so that
no name is looked up a second time.
"""

import inspect
import sys
from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from functools import cache
from typing import Any

from hydra.utils import instantiate
from omegaconf import OmegaConf

from gradpolicy.errors import PolicyError, brief, shown, under
from gradpolicy.imports import (
    KNOWN,
    allowed_packages,
    follow,
    home_of,
    import_by_name,
    is_allowed,
    lies_in,
    to_install,
)
from gradpolicy.launch import kinds
from gradpolicy.launch.messages import LINE, root_cause

TARGET = "_target_"
HYDRA_KEYS = (TARGET, "_args_", "_convert_", "_partial_", "_recursive_")
POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def check_has_target(node: Mapping[str, Any], key: str) -> None:
    """Check that a node names a target if its key takes one kind of class.

    Raises:
        PolicyError: If it does not, with an example.
    """
    expected = _kind_at(key)
    if expected is not None and TARGET not in node:
        raise PolicyError(f"{key}: needs a {TARGET}, such as {expected[1]}")


def locate_target(key: str, node: Mapping[str, Any]) -> Callable[..., Any]:
    """Return the object that the `_target_` of a node names, and check that it may be built there.

    Args:
        key: Its key in the config.
        node: The node.

    Raises:
        PolicyError: If it is not allowed, or does not exist.
    """
    path, full_key = node[TARGET], f"{key}.{TARGET}"
    if not isinstance(path, str) or not all(part.isidentifier() for part in path.split(".")):
        raise PolicyError(f"{full_key}: must be a dotted path to a class or function, got {shown(path)}")
    with under(full_key):
        found = import_by_name(path) if lies_in(path, (*KNOWN, *allowed_packages())) else None
    if found is None:
        raise PolicyError(f"{full_key}: {shown(path)} is not among what a config may build{_hint(path)}")
    if not callable(found):
        raise PolicyError(f"{full_key}: {shown(path)} is a {type(found).__name__}, not a class or function")
    if is_allowed(found):
        return found
    _check_kind(key, path, found)
    _check_arguments(key, path, found, node)
    return found


def build(node: Mapping[str, Any], key: str, kind: type = object, **arguments: Any) -> Any:
    """Build the object of a node of the resolved config, by :func:`hydra.utils.instantiate`.

    Args:
        node: The node, with its ``_target_``.
        key: Its key in the config.
        kind: The class of the result. A function of an allowed package may return anything.
        **arguments: Further arguments of the target.

    Raises:
        PolicyError: If the object is not allowed, building fails, or the result has the wrong type; has the
            key of the innermost node that failed, and the cause.
    """
    tree = {**_checked({**node, "_partial_": True}, key), "_convert_": "all"}
    try:
        # In a plain dictionary the objects would be replaced by their names.
        built = instantiate(OmegaConf.create(tree, flags={"allow_objects": True}))
        if not node.get("_partial_"):
            built = built(**arguments)
    except Exception as error:
        raise _under_key(error, key) from error
    if not isinstance(built, kind):
        raise PolicyError(f"{key}: must be a {kind.__name__}, got {type(built).__name__}")
    return built


def build_all(nodes: Mapping[str, Mapping[str, Any] | None] | None, key: str, kind: type) -> dict[str, Any]:
    """Build each node of a group; removed nodes are null."""
    return {
        name: build(node, f"{key}.{name}", kind) for name, node in (nodes or {}).items() if node is not None
    }


def _checked(value: Any, key: str) -> Any:
    """Return a part of the config with the checked objects as `_target_`."""
    if isinstance(value, list | tuple):
        return [_checked(item, f"{key}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, Mapping):
        below = {name: _checked(item, f"{key}.{name}") for name, item in value.items() if name != "_convert_"}
        if TARGET not in value:
            return below
        target = locate_target(key, value)
        if value.get("_recursive_") is False:
            # The target builds these itself, from their names.
            below = dict(value)
        if not is_allowed(target) and _is_hugging_face_method(target):
            # Without it Hugging Face would ask on the terminal.
            below["trust_remote_code"] = False
        return below | {TARGET: target if value.get("_partial_") else _named(target, key)}
    if isinstance(value, str) and "${" in value:
        # Hydra resolves references once more, after the check.
        raise PolicyError(f"{key}: must not hold a reference that is resolved twice, got {shown(value)}")
    return value


def _named(target: Callable[..., Any], key: str) -> Callable[..., Any]:
    """Return a function that calls a target and puts its key before the message of an error."""

    def call(*arguments: Any, **named: Any) -> Any:
        try:
            return target(*arguments, **named)
        except Exception as error:
            raise _under_key(error, key) from error

    return call


def _under_key(error: Exception, key: str) -> PolicyError:
    cause = root_cause(error)
    if isinstance(cause, ModuleNotFoundError):
        return PolicyError(f"{key}: {to_install(cause)}")
    message = brief(str(cause), most=LINE)
    if isinstance(cause, PolicyError):
        return PolicyError(_message_at(key, message))
    # Lightning's messages are clear without their type; a KeyError is not.
    kind = [] if type(cause).__name__ == "MisconfigurationException" else [type(cause).__name__]
    return PolicyError(": ".join([key, *kind, *([message] if message else [])]))


def _message_at(key: str, message: str) -> str:
    """Prefix a message by a key: ``Stop.mode: …`` at ``policy.cut`` becomes ``policy.cut.mode: …``.

    So does ``when.phases: …`` at ``policy.cut.when``.
    """
    if message.startswith(f"{key.split('.')[0]}."):
        return message
    owner, _, rest = message.partition(": ")
    class_name, _, argument = owner.partition(".")
    own = class_name[:1].isupper() or class_name == key.split(".")[-1]
    if own and argument.isidentifier():
        return f"{key}.{argument}: {rest}"
    return f"{key}: {message}"


# ---- what may be named


def _hint(path: str) -> str:
    package = brief(path.split(".")[0])
    if package in {known.split(".")[0] for known in KNOWN}:
        return "; the kinds of classes that it may are listed in docs/security.md"
    return f"; if you trust the package, allow it on the command line: allowed_targets=[{package}]"


def _kind_at(key: str) -> tuple[str, str] | None:
    """Return the one kind that a key takes, with an example; None if it takes several."""
    for pattern, kind in kinds.KIND_AT.items():
        # A star matches one name, not several.
        if fnmatchcase(key, pattern) and key.count(".") == pattern.count("."):
            return kind
    return None


def _check_kind(key: str, path: str, found: Callable[..., Any]) -> None:
    own = _kind_at(key)
    if isinstance(found, type):
        expected = _classes(kinds.ARGUMENT_KINDS if own is None else (own[0],))
        if issubclass(found, expected) and lies_in(str(home_of(found)), KNOWN):
            return
    elif own is None and (_is_listed(found) or _is_hugging_face_method(found)):
        return
    wanted = own[0].rpartition(".")[2] if own else "kind of class or function that one may build"
    raise PolicyError(
        f"{key}.{TARGET}: {shown(path)} is not among what a config may build: it is no {wanted}{_hint(path)}"
    )


def _check_arguments(key: str, path: str, found: Callable[..., Any], node: Mapping[str, Any]) -> None:
    """Refuse arguments that would make allowed objects load code or a pickle."""
    unnamed = node.get("_args_")
    unnamed = unnamed if isinstance(unnamed, list | tuple) else ()
    if len(unnamed) > 1 and lies_in(str(home_of(found)), kinds.HANDING_ON):
        raise PolicyError(f"{key}._args_: give {path} its arguments by name, but for the first")
    positional = [name for name, each in parameters_of(found).items() if each.kind in POSITIONAL]
    for name, value in zip(positional, unnamed, strict=False):
        _refuse_loading(f"{key}.{name}", name, value, path)
    for name, value in node.items():
        if name not in HYDRA_KEYS or name == "_args_":
            _refuse_loading(f"{key}.{name}", str(name), value, path)


def _refuse_loading(key: str, name: str, value: Any, path: str) -> None:
    """Refuse an argument that loads code or a pickle, also in mappings and lists of its value."""
    # Hugging Face's configs keep some under such names, and take these as well.
    plain = name.strip("_").removesuffix("_internal")
    if plain in kinds.LOADING_ARGUMENTS and value not in kinds.LOADING_ARGUMENTS[plain]:
        raise PolicyError(f"{brief(key)}: may not be set for {path}: it can load code or a pickle")
    if isinstance(value, Mapping) and TARGET not in value:
        for inner, below in value.items():
            _refuse_loading(f"{key}.{inner}", str(inner), below, path)
    elif isinstance(value, list | tuple):
        for index, below in enumerate(value):
            _refuse_loading(f"{key}[{index}]", "", below, path)


def parameters_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a target by name; none if Python does not know them."""
    try:
        return inspect.signature(target).parameters
    except (TypeError, ValueError):
        return {}


def _is_hugging_face_method(found: object) -> bool:
    """Return True for the methods of Hugging Face's classes that build a model or a config."""
    owner, name = getattr(found, "__self__", None), getattr(found, "__name__", "")
    return (
        name in kinds.HUGGING_FACE_METHODS
        and isinstance(owner, type)
        and issubclass(owner, _classes(kinds.HUGGING_FACE_CLASSES))
        and lies_in(str(getattr(found, "__module__", "")), (kinds.HUGGING_FACE,))
    )


def _is_listed(found: object) -> bool:
    return any(_loaded(name) is found for name in kinds.FUNCTIONS)


def _classes(names: tuple[str, ...]) -> tuple[type, ...]:
    return tuple(found for found in map(_loaded, names) if isinstance(found, type))


def _loaded(name: str) -> Any:
    """Return the object of one of the names in :mod:`gradpolicy.launch.kinds`.

    None if its package has not been loaded, since then no object of a config can be of its kind.
    """
    return _found_once(name) if name.split(".")[0] in sys.modules else None


@cache
def _found_once(name: str) -> Any:
    try:
        return follow(name)
    except PolicyError:
        return None
