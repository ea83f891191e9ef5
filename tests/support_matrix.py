"""The table in docs/support.md: which feature works in which loop, on which processes, eager and compiled.

A test says by a mark what it shows, and `--support-matrix=docs/support.md` adds what passed to the table:

    @pytest.mark.supports("entries", "resume", loop="lightning", processes=("ddp", "fsdp2"))
    @pytest.mark.supports("entries", loop="huggingface", processes="deepspeed", no="the reason in short")
"""

import itertools
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

FEATURES = {
    "tensors": "freeze full tensors and layers",
    "rows": "freeze rows",
    "entries": "freeze entries",
    "frozen_state": "`frozen_state`: keep, zero, drop",
    "row gradients": "compute the gradient of active rows only",
    "gradient sources": "mask sources that read gradients",
    "flow": "flow policies",
    "master weights": "`master_weights=True`",
    "step in backward": "`step_in_backward=True`",
    "rates": "`Rates`",
    "phases": "`masks.Phases`",
    "several optimizers": "several optimizers, `Optimizers`",
    "no update rule": "optimizers without an update rule",
    "schedule-free": "ScheduleFree",
    "accumulation": "gradient accumulation",
    "clipping": "gradient clipping by norm",
    "mixed precision": "mixed precision",
    "checkpointing": "activation checkpointing",
    "adapters": "PEFT adapters",
    "resume": "resume, bit for bit",
    "resume elsewhere": "resume under another strategy or number of processes",
    "agreement": "agreement check of the ranks",
    "audit": "audit of frozen entries",
    "delta": "write a delta file",
    "patches": "patches of a step, `gp.delta.patch`",
}
LOOPS = {"plain": "plain", "lightning": "Lightning", "huggingface": "HF"}
PROCESSES = {
    "one": "one process",
    "ddp": "DDP",
    "fsdp2": "FSDP2",
    "deepspeed": "DeepSpeed",
}
START, END = "<!-- support -->\n", "<!-- end -->"
RAN = "supports"
"""The property by which a report carries what its test shows."""


class Support(NamedTuple):
    """One fact of the table: this works, or, if there is a reason, it is refused."""

    feature: str
    loop: str
    processes: str
    mode: str
    reason: str


def supports(
    *features: str,
    loop: str | tuple[str, ...],
    processes: str | tuple[str, ...] = "one",
    compiled: bool | tuple[bool, ...] = False,
    no: str = "",
) -> set[Support]:
    """Return the facts that a mark states: each feature, in each loop, on each kind of processes."""
    axes = [features, *(each if isinstance(each, tuple) else (each,) for each in (loop, processes, compiled))]
    for names, valid in zip(axes, (FEATURES, LOOPS, PROCESSES), strict=False):
        if not names or set(names) - set(valid):
            raise ValueError(f"supports: {names} should be among {', '.join(valid)}")
    modes = {False: "eager", True: "compiled"}
    return {Support(*where, modes[mode], no) for *where, mode in itertools.product(*axes)}


def facts(item: pytest.Item) -> set[Support]:
    """Return what a test shows if it passes.

    ``"{kind}"`` in a mark is the test's parameter `kind`, and ``names={"layers": "tensors"}`` says what a
    parameter's value is called in the table.
    """
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    found: set[Support] = set()
    for mark in item.iter_markers("supports"):
        options = dict(mark.kwargs)
        names = options.pop("names", {})

        def filled(value: Any, names: dict[str, str] = names) -> Any:
            if isinstance(value, tuple):
                return tuple(map(filled, value))
            if isinstance(value, str):
                value = value.format_map(parameters)
                return names.get(value, value)
            return value

        try:
            found |= supports(
                *map(filled, mark.args), **{key: filled(value) for key, value in options.items()}
            )
        except (TypeError, ValueError, KeyError) as error:
            raise pytest.UsageError(f"{item.nodeid}: {error}") from error
    return found


def rendered(known: Iterable[Support]) -> str:
    """Return the table in Markdown, and below it the reasons.

    A cell names the loops: ``plain`` works, ``plain*`` in compiled code too, ``plain no (1)`` is refused for
    the first reason, and ``plain* no (1)`` is in compiled code.
    """
    known, reasons = set(known), list[str]()

    def status(*where: str) -> str | None:
        found = {fact.reason for fact in known if fact[:4] == where}
        own = sorted(filter(None, found))
        reasons.extend(reason for reason in own if reason not in reasons)
        if not own:
            return "" if found else None
        numbers = ", ".join(str(reasons.index(reason) + 1) for reason in own)
        return f" except ({numbers})" if "" in found else f" no ({numbers})"

    def of_loop(feature: str, loop: str, processes: str) -> Iterator[str]:
        eager, compiled = (status(feature, loop, processes, mode) for mode in ("eager", "compiled"))
        if eager is not None and not eager == compiled == "":
            yield f"{LOOPS[loop]}{eager}"
        if compiled is not None:
            yield f"{LOOPS[loop]}*{compiled if compiled or eager == '' else ' alone'}"

    lines = [f"| feature | {' | '.join(PROCESSES.values())} |", f"|{'---|' * (1 + len(PROCESSES))}"]
    for feature in (feature for feature in FEATURES if any(fact.feature == feature for fact in known)):
        cells = (", ".join(each for loop in LOOPS for each in of_loop(feature, loop, p)) for p in PROCESSES)
        lines.append(f"| {FEATURES[feature]} | {' | '.join(cell or '–' for cell in cells)} |")
    lines += ["", *(f"{number}. {reason}" for number, reason in enumerate(reasons, 1))]
    return "\n".join(lines) + "\n"


CELL = re.compile(rf"({'|'.join(LOOPS.values())})(\*?)( alone| except| no)?(?: \(([\d, ]+)\))?")


def parsed(table: str) -> set[Support]:
    """Return the facts of a rendered table."""
    reasons = dict(re.findall(r"^(\d+)\. (.+)$", table, flags=re.MULTILINE))
    features, loops = ({text: name for name, text in names.items()} for names in (FEATURES, LOOPS))

    def of_row(line: str) -> Iterator[Support]:
        feature, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        for where, cell in zip(PROCESSES, cells, strict=True):
            for loop, star, how, numbers in CELL.findall(cell):
                modes = ["compiled"] if star and how else ["eager", "compiled"] if star else ["eager"]
                works = [] if how == " no" else [""]
                for reason in works + [reasons[number] for number in re.findall(r"\d+", numbers)]:
                    yield from (
                        Support(features[feature], loops[loop], where, mode, reason) for mode in modes
                    )

    return {fact for line in table.splitlines()[2:] if line.startswith("|") for fact in of_row(line)}


def split_page(path: Path) -> tuple[str, str, str]:
    """Return a page's text before, within and after the table."""
    before, rest = path.read_text(encoding="utf-8").split(START)
    table, after = rest.split(END)
    return before + START, table, END + after


class Collector:
    """Collects what passed and what failed in a run, and writes it to a page at the end."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.passed: set[Support] = set()
        self.failed: set[Support] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Note a report; under xdist the process that writes gets those of all others."""
        stated = {Support(*fact) for key, value in report.user_properties if key == RAN for fact in value}
        if report.failed:
            self.failed |= stated
        elif report.passed and report.when == "call":
            self.passed |= stated

    def pytest_sessionfinish(self) -> None:
        """Write the page: what it held, and what passed, without what failed."""
        before, table, after = split_page(self.path)
        known = (parsed(table) | self.passed) - self.failed
        self.path.write_text(before + rendered(known) + after, encoding="utf-8")


COLLECTED = pytest.StashKey[dict[Path, set[Support]]]()
"""For each file of which tests were collected, also such as are not selected: what its tests state."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option that names the page."""
    parser.addoption("--support-matrix", metavar="FILE", help="add what passes to the table in this page")


def pytest_configure(config: pytest.Config) -> None:
    """Write the page in the process that the person started."""
    path = config.getoption("--support-matrix")
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(Collector(Path(path)))


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Read the marks before tests are deselected. What needs a GPU is no part of the table."""
    collected = config.stash.setdefault(COLLECTED, {})
    for item in items:
        stated = facts(item)
        if item.get_closest_marker("gpu") is None:
            collected.setdefault(item.path, set()).update(stated)
            if stated:
                item.user_properties.append((RAN, [tuple(fact) for fact in sorted(stated)]))
