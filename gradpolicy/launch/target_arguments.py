"""Checks the arguments in a config by the signatures of classes and functions.

This refuses `trainer.max_epoch` and `optimizer.lr=abc` before anything runs, for any `_target_`, without a
separate list of arguments.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from pydantic import ConfigDict, PydanticUserError, TypeAdapter, ValidationError
from pydantic.errors import PydanticSchemaGenerationError

from gradpolicy.errors import NAMED, PolicyError, brief, constructors, nearest, shown
from gradpolicy.launch.messages import type_error
from gradpolicy.launch.targets import TARGET, check_has_target, locate_target, parameters_of
from gradpolicy.masks import MaskSource
from gradpolicy.policies import Policy

# Hydra's own keys of a node, and their types.
KEY_TYPES: dict[str, Any] = {
    TARGET: str,
    "_partial_": bool,
    "_recursive_": bool,
    "_convert_": Literal["none", "partial", "object", "all"],
    "_args_": list[Any],
}
PLAIN = (str, int, float, bool, type(None))


def check_arguments(config: Any, key: str, *, complete: bool = True) -> None:
    """Check every number, `_target_` and argument in a part of the resolved config.

    Args:
        config: The part.
        key: Its key in the config.
        complete: True if it is built without further arguments, so that all required ones must be given.

    Raises:
        PolicyError: For a missing target or one that a config may not build, a missing required argument, an
            unknown argument, a value of the wrong type, NaN, or an integer of more than 64 bits.
    """
    if isinstance(config, list):
        for index, value in enumerate(config):
            check_arguments(value, f"{key}[{index}]", complete=complete)
    if not isinstance(config, Mapping):
        _check_number(config, key)
        return
    check_has_target(config, key)
    target = locate_target(key, config) if TARGET in config else None
    # The target of a node that is not recursive builds the nodes below, and adds its own arguments.
    complete_below = complete and config.get("_recursive_") is not False
    # Nodes below are checked first: a forbidden target is more important than an unknown argument.
    for name, value in config.items():
        check_arguments(value, f"{key}.{name}", complete=complete_below)
    if target is not None:
        _check_call(target, config, key)
        if complete and not config.get("_partial_") and "_args_" not in config:
            _check_complete(target, config, key)


def _check_number(value: Any, key: str) -> None:
    """Refuse NaN, which most checks accept, and integers above 64 bits, which overflow in torch."""
    if isinstance(value, int) and abs(value) >= 2**63:
        raise PolicyError(f"{brief(key)}: takes more than 64 bits, got {shown(value)}")
    if isinstance(value, float) and math.isnan(value):
        raise PolicyError(f"{brief(key)}: must be a number, got nan")


def argument_names(target: Callable[..., Any]) -> tuple[dict[str, inspect.Parameter], bool]:
    """Return the arguments of a target by name, and True if it also takes others.

    A policy or a mask source passes arguments on to its base classes, so theirs are included.
    """
    known: dict[str, inspect.Parameter] = {}
    takes_any = True
    for function in _signed(target):
        try:
            parameters = _signature(function).parameters.values()
        except (TypeError, ValueError):
            break
        for parameter in parameters:
            if parameter.kind in NAMED and parameter.name != "self":
                known.setdefault(parameter.name, parameter)
        takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
        if not takes_any:
            break
    return known, takes_any


def _signed(target: Callable[..., Any]) -> list[Callable[..., Any]]:
    if isinstance(target, type) and issubclass(target, Policy | MaskSource):
        return constructors(target)
    if getattr(target, "__name__", "") == "WandbLogger":
        # Lightning's logger passes other arguments to W&B.
        import wandb

        return [target, wandb.init]
    return [target]


def _signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:
        # An annotation uses a name that is imported for type checking only.
        return inspect.signature(function)


def _check_call(target: Callable[..., Any], config: Mapping[str, Any], key: str) -> None:
    parameters, takes_any = argument_names(target)
    for name, value in config.items():
        full_key = brief(f"{key}.{name}")
        if name in KEY_TYPES:
            check_value(full_key, KEY_TYPES[name], value)
        elif name in parameters:
            _check_type(full_key, parameters[name], value)
        elif not takes_any:
            raise PolicyError(
                f"{full_key}: {config[TARGET]} takes no such argument; {nearest(str(name), parameters)}"
            )


def _check_complete(target: Callable[..., Any], config: Mapping[str, Any], key: str) -> None:
    path = config[TARGET]
    for name, parameter in parameters_of(target).items():
        if parameter.kind not in NAMED or parameter.default is not parameter.empty or name in config:
            continue
        if isinstance(target, type) and issubclass(target, torch.optim.Optimizer):
            raise PolicyError(f"{key}._partial_: must be true: the model gives {path} its {name}")
        raise PolicyError(f"{key}.{name}: {path} needs a value for it")


def _check_type(key: str, parameter: inspect.Parameter, value: Any) -> None:
    is_known = parameter.annotation is not parameter.empty and not isinstance(parameter.annotation, str)
    if is_known and value != parameter.default and not _has_target(value):
        check_value(key, parameter.annotation, value)


def check_value(key: str, annotation: Any, value: Any) -> None:
    """Check a value from a config against an annotation.

    Raises:
        PolicyError: If it does not match; names the expected types.
    """
    problems = misfits(value, annotation)
    if problems:
        raise type_error(key, problems)


def misfits(value: Any, annotation: Any) -> list[Any]:
    """Return pydantic's errors for a value and an annotation; empty if it matches.

    Strings are not converted to numbers.

    Example:
        >>> misfits(3, float), misfits([0.9, 0.99], tuple[float, float])
        ([], [])
        >>> [problem["type"] for problem in misfits("abc", float)]
        ['float_type']
    """
    adapter = adapter_of(annotation)
    problems: list[Any] = []
    if adapter is None:
        return problems
    # YAML has no tuples, so a list is accepted for one. Nothing else is converted.
    for strict in (True, False) if not isinstance(value, PLAIN) else (True,):
        try:
            adapter.validate_python(value, strict=strict)
        except PydanticUserError:
            # Pydantic does not support a class of the annotation, such as a config of transformers.
            return []
        except ValidationError as error:
            problems = error.errors()
        else:
            return []
    return problems


def adapter_of(annotation: Any) -> TypeAdapter[Any] | None:
    """Return pydantic's adapter of an annotation; None if pydantic does not support it."""
    try:
        return TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True))
    except (PydanticSchemaGenerationError, PydanticUserError, TypeError, NameError):
        return None


def _has_target(value: Any) -> bool:
    if isinstance(value, Mapping):
        return TARGET in value or any(_has_target(item) for item in value.values())
    return isinstance(value, list) and any(_has_target(item) for item in value)
