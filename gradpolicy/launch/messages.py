"""Turns the errors of Hydra, OmegaConf, YAML and Lightning for wrong input into one clear message."""

import errno
import re
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

import yaml
from hydra.errors import (
    ConfigCompositionException,
    HydraException,
    InstantiationException,
    MissingConfigException,
    OverrideParseException,
)
from omegaconf.errors import OmegaConfBaseException

from gradpolicy.errors import PolicyError, brief, nearest, shown

WRONG_INPUT = 2
FAILED = 1
INTERRUPTED = 130
TERMINATED = 143
# The longest quotation of a library's message, in characters.
LINE = 300
# The longest message of this program, in characters.
LONGEST = 800
# What a value must be, by the type of pydantic's error.
WANTED = {
    "bool_type": "true or false",
    "callable_type": "a function",
    "dict_type": "a mapping of keys to values",
    "float_parsing": "a number",
    "float_type": "a number",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "iterable_type": "a list",
    "list_type": "a list",
    "missing": "given",
    "string_type": "text",
    "too_long": "shorter",
    "tuple_type": "a list",
}


def wrong_input_errors() -> tuple[type[Exception], ...]:
    """The errors that wrong input causes before training starts."""
    # Lightning takes seconds to import. If it has not been imported, it has raised nothing.
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    of_lightning = (lightning.MisconfigurationException,) if lightning else ()
    return PolicyError, HydraException, OmegaConfBaseException, yaml.YAMLError, *of_lightning


def explain(error: BaseException) -> str:
    """Says in one line what was wrong with the input, as plainly as the error allows."""
    return brief(_explanation(error), most=LONGEST)


def full_disk(error: BaseException | None) -> OSError | None:
    """The error of a full disk, or of a quota that is used up, from which another came; None without one."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return error
        error = error.__cause__ or error.__context__
    return None


def _explanation(error: BaseException) -> str:
    if isinstance(error, PolicyError):
        return str(error)
    if isinstance(error, MissingConfigException):
        return _missing_choice(error)
    if isinstance(error, InstantiationException):
        return _failed_instance(error)
    if isinstance(error, OverrideParseException) and "=" not in error.override.lstrip("~"):
        return f"{brief(error.override)}: is no override; write key=value"
    if isinstance(error, OverrideParseException):
        return (
            f"{brief(error.override)}: cannot be read as an override{_reason(error)}; quote what is special"
        )
    if isinstance(error, ConfigCompositionException) and error.__cause__ is not None:
        return f"{_first_line(error).rstrip('.')}: {_first_line(error.__cause__)}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        line = re.sub(r"^\w+ raised while resolving interpolation: ", "", _first_line(error))
        return f"{brief(str(error.full_key))}: {line.strip(chr(34))}"
    if isinstance(error, yaml.YAMLError):
        return f"the file is no valid YAML: {brief(' '.join(str(error).split()), most=LINE)}"
    full = full_disk(error)
    if full is not None:
        reason = (full.strerror or "the disk is full").lower()
        return (
            f"nothing can be written to {full.filename or 'the disk'}: {reason}; make room, and "
            "ckpt_path=last goes on from the last checkpoint"
        )
    return _first_line(error)


def type_error(key: str, problems: Sequence[Mapping[str, Any]], *, nullable: bool = False) -> PolicyError:
    """Says which types a value may have.

    Args:
        key: Its key in the config.
        problems: What pydantic says is wrong, for each type that the value may have.
        nullable: Whether it may be null, too.

    Example:
        >>> type_error("seed", [{"type": "int_type", "loc": (), "msg": "", "input": "x"}])
        PolicyError("seed: must be a whole number, got 'x'")
    """
    wanted = [WANTED.get(each["type"]) or each["msg"].removeprefix("Input should be ") for each in problems]
    *others, last = dict.fromkeys([*wanted, *(["null"] if nullable else [])])
    either = f"{', '.join(others)} or {last}" if others else last
    index = "".join(f"[{part}]" for part in problems[0]["loc"] if isinstance(part, int))
    return PolicyError(f"{key}{index}: must be {brief(either, most=200)}, got {shown(problems[0]['input'])}")


def report_error(error: BaseException, show_traceback: bool) -> None:
    """Prints a message for wrong input, with a traceback if asked for, to the standard error stream."""
    if show_traceback:
        traceback.print_exception(error)
    print(f"error: {explain(error)}", file=sys.stderr)


def root_cause(error: BaseException) -> BaseException:
    """Follows the chain of causes to the first, or to one that is written for a person to read."""
    while error.__cause__ is not None and not isinstance(error, PolicyError):
        error = error.__cause__
    return error


def _missing_choice(error: MissingConfigException) -> str:
    path = str(error.missing_cfg_file or "")
    group, _, name = path.rpartition("/")
    if not group:
        return f"no config {shown(path)} found; {_first_line(error)}"
    given, group = brief(f"{group}={name}"), brief(group)
    return f"{given}: there is no such {group}; {nearest(name, error.options or ())}".rstrip("; ")


def _failed_instance(error: InstantiationException) -> str:
    """Why Hydra could not build a callback, launcher or sweeper, under the key of its node."""
    cause, key = root_cause(error), re.search(r"full_key: (\S+)", str(error))
    what = f"{type(cause).__name__}: {_first_line(cause)}"
    return f"{key[1]}: {what}" if key else what


def _reason(error: OverrideParseException) -> str:
    """What Hydra says was wrong with an override, without the lines that repeat it."""
    repeated = ("LexerNoViableAltException", "Error parsing override", "See https", "^")
    said = [line.strip() for line in str(error).splitlines()]
    return next((f": {brief(line)}" for line in said if line and not line.startswith(repeated)), "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return brief(lines[0], most=LINE) if lines else type(error).__name__
