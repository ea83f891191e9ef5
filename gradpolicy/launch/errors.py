"""Turns what Hydra, OmegaConf, YAML and Lightning raise for wrong input into one clear message."""

import re
import sys
import traceback

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
# As much as is quoted of what others say.
LINE = 300
# No message is longer, whatever it quotes.
LONGEST = 800


def wrong_input_errors() -> tuple[type[Exception], ...]:
    """What was caused by what the user gave, whatever of these ends a run before it trains."""
    # Lightning takes seconds to load; it has raised nothing where nobody has loaded it.
    lightning = sys.modules.get("lightning.fabric.utilities.exceptions")
    of_lightning = (lightning.MisconfigurationException,) if lightning else ()
    return PolicyError, HydraException, OmegaConfBaseException, yaml.YAMLError, *of_lightning


def explain(error: BaseException) -> str:
    """Says in one line what was wrong with the input, as plainly as the error allows."""
    return brief(_explanation(error), most=LONGEST)


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
    return _first_line(error)


def report_error(error: BaseException, show_traceback: bool) -> None:
    """Prints a message for wrong input to the standard error stream; with its traceback where asked for."""
    if show_traceback:
        traceback.print_exception(error)
    print(f"error: {explain(error)}", file=sys.stderr)


def root_cause(error: BaseException) -> BaseException:
    """Follows the chain of causes to its beginning, or to what is said for a person to read."""
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
    """The first cause of a failed instantiation, under the key of the config node."""
    cause = root_cause(error)
    message = str(error)
    found = re.search(r"full_key: (\S+)", message)
    key = found.group(1) if found else ""
    what = str(cause) if isinstance(cause, PolicyError) else f"{type(cause).__name__}: {_first_line(cause)}"
    if cause is error:
        what = _first_line(error)
    return what if not key or what.startswith(f"{key.split('.')[0]}.") else f"{key}: {what}"


def _reason(error: OverrideParseException) -> str:
    """What Hydra says was wrong with an override, beside repeating it."""
    repeated = ("LexerNoViableAltException", "Error parsing override", "See https", "^")
    said = [line.strip() for line in str(error).splitlines()]
    return next((f": {brief(line)}" for line in said if line and not line.startswith(repeated)), "")


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return brief(lines[0], most=LINE) if lines else type(error).__name__
