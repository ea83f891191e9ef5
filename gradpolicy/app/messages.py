"""Clear one-line messages for errors that invalid input causes in libraries."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from gradpolicy.errors import PolicyError, brief, shown
from gradpolicy.imports import to_install

# The maximum length of a quoted library message, in characters.
LINE = 300
# The maximum length of a message, in characters.
LONGEST = 800


def wrong_input_errors() -> tuple[type[Exception], ...]:
    """Return the types of errors that invalid input causes before training starts."""
    # Lightning takes seconds to import. If it has not been imported, it has raised nothing.
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    of_lightning = (lightning.MisconfigurationException,) if lightning else ()
    return PolicyError, HydraException, OmegaConfBaseException, yaml.YAMLError, *of_lightning


def explain(error: BaseException) -> str:
    """Return a message of one line for an error that invalid input has caused."""
    return brief(_explanation(error), most=LONGEST)


def _explanation(error: BaseException) -> str:
    cause = root_cause(error)
    if isinstance(cause, ModuleNotFoundError):
        return to_install(cause)
    if isinstance(error, PolicyError):
        return str(error)
    if isinstance(error, OverrideParseException):
        return f"{brief(error.override)}: cannot be read; write key=value, and quote what is special"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        # Without the type of an error within a resolver, which precedes its message.
        said = str(error).partition("\n")[0].rpartition("KeyError raised while resolving interpolation: ")[2]
        return f"{brief(str(error.full_key))}: {brief(said, most=LINE)}"
    return one_line(error)


def type_error(key: str, problems: Sequence[Mapping[str, Any]]) -> PolicyError:
    """Return an error with the types that a value may have.

    Args:
        key: Its key in the config.
        problems: Pydantic's errors, one for each type that the value may have.

    Example:
        >>> type_error("seed", [{"msg": "Input should be a valid integer", "loc": (), "input": "x"}])
        PolicyError("seed: must be a valid integer, got 'x'")
    """
    first, *others = dict.fromkeys(problem["msg"] for problem in problems)
    wanted = [
        first.replace("Input should be", "must be"),
        *(o.removeprefix("Input should be ") for o in others),
    ]
    index = "".join(f"[{part}]" for part in problems[0]["loc"] if isinstance(part, int))
    text = brief(" or ".join(wanted), most=200)
    return PolicyError(f"{key}{index}: {text}, got {shown(problems[0]['input'])}")


def root_cause(error: BaseException) -> BaseException:
    """Return the first error in the chain of causes, or one with a message for users."""
    while error.__cause__ is not None and not isinstance(error, PolicyError):
        error = error.__cause__
    return error


def one_line(error: BaseException) -> str:
    """Return an error's message in one line, with that of its cause."""
    said = str(error) if error.__cause__ is None else f"{error}: {error.__cause__}"
    return brief(" ".join(said.split()) or type(error).__name__, most=LINE)
