"""Checks what a config gives a class or function against its signature: names of arguments, and types.

This refuses `trainer.max_epoch` and `optimizer.lr=abc` before anything runs, for any `_target_`, and needs no
second list of its arguments.
"""

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import torch
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from gradpolicy.errors import NAMED, PolicyError, brief, constructors, nearest, shown
from gradpolicy.launch.targets import TARGET, locate_target
from gradpolicy.policies import Policy

# The keys of a node that say how it is built, and what each may hold.
KEY_TYPES: dict[str, Any] = {
    "_target_": str,
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_args_": list[Any],
}
PLAIN = (str, int, float, bool, type(None))
WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text", type(None): "null"}


def check_arguments(config: Any, key: str, *, complete: bool = True) -> None:
    """Checks every number, `_target_` and argument in a part of the resolved config.

    Args:
        config: The part.
        key: Where it stands in the config.
        complete: Whether it is built as it stands, so that every required argument must be there.

    Raises:
        PolicyError: For a target that a config may not build, a required argument that is absent, one that
            the target does not take, a value of another type, NaN, or an integer of more than 64 bits.
    """
    if isinstance(config, list):
        for index, value in enumerate(config):
            check_arguments(value, f"{key}[{index}]", complete=complete)
    if not isinstance(config, Mapping):
        _check_number(config, key)
        return
    target = locate_target(key, config) if TARGET in config else None
    # Below a node that is not recursive the target adds arguments of its own.
    complete_below = complete and config.get("_recursive_") is not False
    # What lies below first: a target that may not be built matters more than an argument that is unknown.
    for name, value in config.items():
        check_arguments(value, f"{key}.{name}", complete=complete_below)
    if target is not None:
        _check_call(target, config, key)
        if complete and not config.get("_partial_") and "_args_" not in config:
            _check_complete(target, config, key)


def _check_number(value: Any, key: str) -> None:
    """Refuses numbers that no class handles: most checks let NaN through, and torch overflows at 64 bits."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise PolicyError(f"{brief(key)}: takes more than 64 bits, got {shown(value)}")
    if isinstance(value, float) and math.isnan(value):
        raise PolicyError(f"{brief(key)}: must be a number, got nan")


def argument_names(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Gives the arguments that a target takes by name, and whether it takes any other names too.

    A policy passes arguments on to its base classes; theirs are included.
    """
    known: dict[str, inspect.Parameter] = {}
    for function in _signed(target):
        try:
            parameters = inspect.signature(function).parameters.values()
        except (TypeError, ValueError):
            return known, True
        for parameter in parameters:
            known.setdefault(parameter.name, _with_type(parameter, function))
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters):
            return _by_name(known), False
    return _by_name(known), True


def _signed(target: Callable[..., Any]) -> list[Callable[..., Any]]:
    if isinstance(target, type) and issubclass(target, Policy):
        return constructors(target)
    if getattr(target, "__name__", "") == "WandbLogger":
        # Lightning's logger passes other arguments on to W&B.
        import wandb

        return [target, wandb.init]
    return [target]


def _by_name(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in NAMED and name != "self"
    }


def _with_type(parameter: inspect.Parameter, function: Callable[..., Any]) -> inspect.Parameter:
    """Evaluates an annotation that is a string; one that cannot be evaluated counts as none."""
    if not isinstance(parameter.annotation, str):
        return parameter
    code = inspect.unwrap(function.__init__ if isinstance(function, type) else function)  # type: ignore[misc]
    try:
        found = eval(parameter.annotation, getattr(code, "__globals__", {}))
    except Exception:
        found = inspect.Parameter.empty
    return parameter.replace(annotation=found)


def _check_call(target: Callable[..., Any], config: Mapping[str, Any], key: str) -> None:
    parameters, takes_any = argument_names(target)
    for name, value in config.items():
        place = brief(f"{key}.{name}")
        if name in KEY_TYPES:
            _check_fits(place, KEY_TYPES[name], value)
        elif name in parameters:
            _check_type(place, parameters[name], value)
        elif not takes_any:
            raise PolicyError(
                f"{place}: {config['_target_']} takes no such argument; {nearest(str(name), parameters)}"
            )


def _check_complete(target: Callable[..., Any], config: Mapping[str, Any], key: str) -> None:
    try:
        parameters = inspect.signature(target).parameters
    except (TypeError, ValueError):
        return
    for name, parameter in _by_name(parameters).items():
        if parameter.default is not parameter.empty or name in config:
            continue
        path = config["_target_"]
        if isinstance(target, type) and issubclass(target, torch.optim.Optimizer):
            raise PolicyError(f"{key}._partial_: must be true: the model gives {path} its {name}")
        raise PolicyError(f"{key}.{name}: {path} needs a value for it")


def _check_type(key: str, parameter: inspect.Parameter, value: Any) -> None:
    if parameter.annotation is inspect.Parameter.empty or value == parameter.default or _has_target(value):
        return
    _check_fits(key, parameter.annotation, value)


def _check_fits(key: str, annotation: Any, value: Any) -> None:
    if not fits(value, annotation):
        raise PolicyError(f"{key}: must be {brief(in_words(annotation), most=200)}, got {shown(value)}")


def in_words(annotation: Any) -> str:
    """What an annotation allows, as a person says it.

    Example:
        >>> in_words(int | None), in_words(tuple[float, float]), in_words(Literal["min", "max"])
        ('a whole number or null', 'a list of 2: a number, a number', "'min' or 'max'")
    """
    *others, last = dict.fromkeys(_alternatives(annotation))
    return f"{', '.join(others)} or {last}" if others else last


def _alternatives(annotation: Any) -> list[str]:
    parts = get_args(annotation)
    if get_origin(annotation) in (Union, UnionType):
        return [words for part in parts for words in _alternatives(part)]
    if get_origin(annotation) is Literal:
        return [repr(part) for part in parts]
    return [WORDS.get(annotation) or _kind(annotation)]


def _kind(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is tuple and parts and parts[-1] is not Ellipsis:
        return f"a list of {len(parts)}: {', '.join(map(in_words, parts))}"
    if origin is Callable:
        return "a function"
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return "a mapping"
    if isinstance(origin, type) and issubclass(origin, Iterable):
        return f"a list of {in_words(parts[0])}" if parts else "a list"
    return inspect.formatannotation(annotation)


def fits(value: Any, annotation: Any) -> bool:
    """Whether a value from a config suits an annotation. Text never stands for a number.

    Example:
        >>> fits(3, float), fits("abc", float), fits([0.9, 0.99], tuple[float, float])
        (True, False, True)
    """
    try:
        adapter = TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError):
        return True
    # A list may stand for a tuple, which YAML does not have; nothing else is converted.
    for strict in (True, False) if not isinstance(value, PLAIN) else (True,):
        try:
            adapter.validate_python(value, strict=strict)
        except ValidationError:
            continue
        return True
    return False


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return "_target_" in value or any(_has_target(item) for item in value.values())
    return isinstance(value, list) and any(_has_target(item) for item in value)
