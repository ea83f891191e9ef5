"""Checks the arguments that a config gives a class or function against its signature: names and types.

So `trainer.max_epoch` and `optimizer.lr=abc` are caught before anything runs, for whatever `_target_` a
config names, and no second list of its arguments has to be kept.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from gradpolicy.errors import NAMED, PolicyError, constructors, nearest
from gradpolicy.launch.targets import ALLOWED, locate_target
from gradpolicy.policies import Policy

HYDRAS_KEYS = ("_target_", "_partial_", "_recursive_", "_convert_", "_args_")
PLAIN = (str, int, float, bool, type(None))


def check_arguments(config: Any, allowed: tuple[str, ...] = (), key: str = "") -> None:
    """Checks the arguments of every `_target_` in a resolved config.

    Args:
        config: The config.
        allowed: Packages that are allowed beside the usual ones.
        key: Where it stands, for the messages.

    Raises:
        PolicyError: For an argument that its target does not take, or a value of another type.
    """
    if isinstance(config, list):
        for index, value in enumerate(config):
            check_arguments(value, allowed, f"{key}[{index}]")
    if not isinstance(config, Mapping):
        return
    if "_target_" in config:
        target = locate_target(f"{key}._target_", config["_target_"], (*ALLOWED, *allowed))
        _check_call(target, config, key)
    for name, value in config.items():
        check_arguments(value, allowed, f"{key}.{name}" if key else str(name))


def argument_names(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Gives the arguments that a target takes by name, and whether it takes any others too.

    A policy passes what it does not know on to its base class; those arguments are found there.
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
    return [target]


def _by_name(parameters: Mapping[str, inspect.Parameter]) -> dict[str, inspect.Parameter]:
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in NAMED and name != "self"
    }


def _with_type(parameter: inspect.Parameter, function: Callable[..., Any]) -> inspect.Parameter:
    """Evaluates an annotation that is written as text; one that cannot be counts as none."""
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
        if name in HYDRAS_KEYS:
            continue
        if name in parameters:
            _check_type(f"{key}.{name}", parameters[name], value)
        elif not takes_any:
            raise PolicyError(
                f"{key}.{name}: {config['_target_']} takes no such argument; {nearest(str(name), parameters)}"
            )
    if isinstance(target, type) and issubclass(target, Policy) and "_args_" not in config:
        # Others may be handed arguments that no config can hold, such as a model's parameters.
        for name, parameter in inspect.signature(target).parameters.items():
            if parameter.kind in NAMED and parameter.default is parameter.empty and name not in config:
                raise PolicyError(f"{key}.{name}: {config['_target_']} needs a value for it")


def _check_type(key: str, parameter: inspect.Parameter, value: Any) -> None:
    if parameter.annotation is inspect.Parameter.empty or value == parameter.default or _has_target(value):
        return
    if not fits(value, parameter.annotation):
        wanted = inspect.formatannotation(parameter.annotation)
        raise PolicyError(f"{key}: must be {wanted}, got {value!r}")


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
