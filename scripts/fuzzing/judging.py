"""Judges the outcome of a case: accepted and right, refused in one clear line, or a fault."""

import math
import re
from collections.abc import Iterator
from typing import Any

import yaml
from omegaconf import OmegaConf

from fuzzing.case import Case, Expectation
from fuzzing.running import Outcome

ACCEPTED, REFUSED, FAULT = "accepted and right", "one clear line", "fault"
RESULTS = (ACCEPTED, REFUSED, FAULT)
LONGEST = 500
# Messages of unexpected errors, not of checks.
STUMBLED = re.compile(
    r"\b(?:AssertionError|AttributeError|IndexError|KeyError|MemoryError|NameError|NotImplementedError|"
    r"RecursionError|UnboundLocalError|ZeroDivisionError)\b| at 0x[0-9a-f]{6}"
)
ABSENT = object()


def judge(case: Case, outcome: Outcome) -> tuple[str, str]:
    """Return one of :data:`RESULTS`, and the complaint if it is a fault."""
    complaint = next(_complaints(case, outcome), "")
    return FAULT if complaint else ACCEPTED if outcome.code == 0 else REFUSED, complaint


def _complaints(case: Case, outcome: Outcome) -> Iterator[str]:
    """Yield all complaints, the worst first."""
    for what in outcome.forbidden:
        yield f"it did what no input may do: {what}"
    if outcome.code is None:
        yield f"it hangs: killed after {outcome.seconds:.0f} s"
    elif outcome.code < 0:
        yield f"ended by signal {-outcome.code}"
    elif outcome.code not in (0, 2):
        yield f"exit code {outcome.code}"
    if "Traceback (most recent call last)" in outcome.out + outcome.err:
        yield "a traceback"
    yield from _leavings(case, outcome)
    yield from _wrongly_accepted(case, outcome) if outcome.code == 0 else _wrongly_refused(case, outcome)


def _leavings(case: Case, outcome: Outcome) -> Iterator[str]:
    for change in outcome.changed:
        run = change.startswith("outputs") and change.endswith("is new")
        if not (run and outcome.code == 0 and case.leaves_runs):
            yield f"left behind: {change}"


# ---- refused


def _wrongly_refused(case: Case, outcome: Outcome) -> Iterator[str]:
    if case.expectation is Expectation.ACCEPT:
        yield "refused, although there is nothing wrong with it"
    lines = _lines(outcome.err)
    if len(lines) != 1:
        yield f"{len(lines)} lines instead of one"
        return
    (message,) = lines
    if len(message) > LONGEST:
        yield f"a line of {len(message)} characters"
    if "`weights_only`" in message or "weights_only=" in message:
        yield "the message repeats torch's advice to load with weights_only=False"
    if not message.removeprefix("error:").strip():
        yield "an empty message"
    stumbled = STUMBLED.search(message)
    if stumbled:
        yield f"the message is that of a program that stumbled: {stumbled[0].strip()}"
    if case.names and not any(name in message for name in case.names):
        yield f"the message names none of {', '.join(repr(name) for name in case.names)}"


def _lines(err: str) -> list[str]:
    """Return the lines of the error stream, without warnings."""
    return [line for line in err.splitlines() if line.strip() and not line.startswith("warning:")]


# ---- accepted


def _wrongly_accepted(case: Case, outcome: Outcome) -> Iterator[str]:
    if case.expectation is Expectation.REFUSE:
        yield "accepted, although it is wrong"
    if _lines(outcome.err):
        yield f"accepted, with more than warnings on the error stream: {_lines(outcome.err)[0][:200]}"
    config = yaml.safe_load(outcome.out) if "--cfg" in case.arguments else outcome.config
    if not isinstance(config, dict):
        yield "accepted, but nothing was run"
        return
    for key, wanted in case.holds.items():
        if not same(found := _select(config, key), wanted):
            yield f"accepted, but {key} is {_shown(found)} instead of {_shown(wanted)}"


def same(found: Any, wanted: Any) -> bool:
    """Return True if two values of configs are equal, with their types.

    Example:
        >>> same([1, {"a": 2.0}], [1, {"a": 2.0}]), same(1, True), same(float("nan"), float("nan"))
        (True, False, True)
    """
    if isinstance(wanted, dict) and isinstance(found, dict):
        # Merging keeps the existing keys of a mapping. Keys have been converted to JSON.
        named = {str(key): value for key, value in found.items()}
        return all(str(key) in named and same(named[str(key)], value) for key, value in wanted.items())
    if isinstance(wanted, list) and isinstance(found, list):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(wanted, float) and isinstance(found, float) and math.isnan(wanted):
        return math.isnan(found)
    return type(found) is type(wanted) and found == wanted


def _select(config: dict[str, Any], key: str) -> Any:
    """Return the value of a dotted key, with references resolved."""
    found: Any = config
    for part in key.split("."):
        if not isinstance(found, dict) or part not in found:
            return ABSENT
        found = found[part]
    if isinstance(found, str) and "${" in found:
        return OmegaConf.select(OmegaConf.create(config), key, throw_on_resolution_failure=False)
    return found


def _shown(value: Any) -> str:
    return "absent" if value is ABSENT else repr(value)[:100]
