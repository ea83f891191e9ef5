"""Mutates command lines, policy files and checkpoints, runs them, and sorts what comes out.

    python scripts/fuzz.py --cases 2000
    python scripts/fuzz.py --seed 3 --kind checkpoint
    python scripts/fuzz.py --seed 3 --only 71 --keep /tmp/case

Three things may come of a case: it is accepted and right, it is refused in one clear line, and all else is a
fault: a traceback, another exit code, a hang, a crash, something left behind, code that ran, a value that is
not held, nonsense that was accepted. Each case follows from the seed and its number, so that `--only` runs it
again, as long as this program and the one it tries stay what they are. The exit code is 1 where there was a
fault.

A case runs in a fork of this process, in a folder of its own, with everything imported: what depends on a
fresh process, on more than one rank or on a GPU is not tried here. Of an accepted case is known that it held
the values it was given, did nothing forbidden and left nothing behind, not that all of it is right.
"""

import argparse
import gc
import os
import random
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from rich.console import Console
from rich.markup import escape
from rich.table import Table

# Everything that a run imports is imported once, here; each case is a fork.
import gradpolicy.launch.run  # noqa: F401
from fuzzing import checkpoints, commands, policies
from fuzzing.case import Case
from fuzzing.judging import FAULT, RESULTS, Verdict, judge
from fuzzing.running import Outcome, Program, Running, write_files
from gradpolicy.launch.app import main as train

# Of ten cases so many are of each kind.
KINDS = ("command",) * 5 + ("policy",) * 3 + ("checkpoint",) * 2


@dataclass(frozen=True)
class Judged:
    """A case with its number, what came of it and how that was judged."""

    number: int
    kind: str
    case: Case
    outcome: Outcome
    verdict: Verdict


def program(arguments: Sequence[str]) -> int:
    """What is tried."""
    return train(commands.CONF, arguments)


def kind_of(number: int) -> str:
    """The kind of the case with a number."""
    return KINDS[number % len(KINDS)]


def make_case(seed: int, number: int, material: checkpoints.Material) -> Case:
    """The case that follows from a seed and a number."""
    draw = random.Random(f"{seed}/{number}")
    if kind_of(number) == "command":
        return commands.mutate(draw)
    if kind_of(number) == "policy":
        return policies.mutate(draw)
    return checkpoints.mutate(draw, material)


def run_cases(
    numbered: Iterable[tuple[int, Case]], tried: Program, *, jobs: int, limit: float, folder: Path
) -> Iterator[Judged]:
    """Runs cases beside each other.

    Args:
        numbered: The cases with their numbers.
        tried: What is run.
        jobs: How many run at a time.
        limit: Seconds that each may take.
        folder: Where each gets a folder, which is removed when it ends.

    Yields:
        Each case when it has ended.
    """
    waiting = iter(numbered)
    runs: dict[int, Running] = {}
    try:
        while True:
            while len(runs) < jobs and (following := next(waiting, None)) is not None:
                number, case = following
                runs[number] = Running(case, tried, folder / str(number))
            if not runs:
                return
            for number, running in list(runs.items()):
                outcome = running.ended(limit)
                if outcome is not None:
                    del runs[number]
                    shutil.rmtree(folder / str(number))
                    verdict = judge(running.case, outcome)
                    yield Judged(number, kind_of(number), running.case, outcome, verdict)
            time.sleep(0.003)
    finally:
        for running in runs.values():
            running.kill()


def show(judged: Sequence[Judged], seed: int, console: Console) -> None:
    """Prints the faults, those of a sort together, then the table."""
    sorts: dict[str, list[Judged]] = defaultdict(list)
    for one in judged:
        if one.verdict.result == FAULT:
            sorts[_sort(one)].append(one)
    for alike in sorts.values():
        show_fault(alike[0], seed, console)
        others = ", ".join(str(one.number) for one in alike[1:12])
        if others:
            console.print(f"  {len(alike) - 1} more of this sort: {others}")
    table = Table(title=f"Seed {seed}", title_justify="left", header_style="bold")
    for column in ("kind", "cases", *RESULTS, "s a case"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for kind in dict.fromkeys(KINDS):
        of_kind = [one for one in judged if one.kind == kind]
        results = Counter(one.verdict.result for one in of_kind)
        seconds = sum(one.outcome.seconds for one in of_kind) / max(len(of_kind), 1)
        counts = [str(results[result]) for result in RESULTS]
        table.add_row(kind, str(len(of_kind)), *counts, f"{seconds:.2f}")
    console.print(table)


def show_fault(fault: Judged, seed: int, console: Console) -> None:
    """Prints a fault with what brings it about."""
    case, outcome = fault.case, fault.outcome
    console.rule(style="red")
    console.print(
        f"[bold red]case {fault.number}[/] ({escape(case.mutation)}, {case.expectation})", soft_wrap=True
    )
    console.print(f"[bold]{escape(fault.verdict.complaint[:600])}[/]", soft_wrap=True)
    console.print(f"  python train.py {_cut(shlex.join(case.arguments), 1500)}", markup=False, soft_wrap=True)
    for name, content in case.files.items():
        if name.endswith(".yaml"):
            text = _cut(content.decode(errors="replace"), 1500)
            console.print(f"  {name}:\n{_indented(text)}", markup=False, highlight=False, soft_wrap=True)
    said = _cut("\n".join((outcome.out + outcome.err).strip().splitlines()[-12:]), 2500)
    console.print(f"  it said:\n{_indented(said)}", markup=False, highlight=False, soft_wrap=True)
    console.print(f"  again: python scripts/fuzz.py --seed {seed} --only {fault.number} --keep FOLDER")


def _sort(fault: Judged) -> str:
    """What faults of one sort have in common: the complaint, and where an error was raised."""
    places = re.findall(r'File "[^"]*?([\w/]+\.py)", line (\d+)', fault.outcome.out + fault.outcome.err)
    complaint = re.sub(r"'[^']*'|\d+", "…", fault.verdict.complaint)
    mutation = "" if places else fault.case.mutation.partition(":")[0]
    return f"{mutation} {complaint[:80]} {places[-1:]}"


def _cut(text: str, length: int) -> str:
    printable = text.encode("utf-8", "backslashreplace").decode()
    return printable if len(printable) <= length else f"{printable[:length]} … ({len(text)} characters)"


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" for line in text.splitlines())


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Reads the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="draws the mutations (default: %(default)s)")
    parser.add_argument("--kind", choices=tuple(dict.fromkeys(KINDS)), help="only cases of this kind")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="only the case with this number")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="leave the files of `--only` here")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case (default: %(default)s)")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> int:
    """Runs the program; the exit code is 1 where there was a fault."""
    parsed = parse(arguments)
    console = Console(width=None if sys.stdout.isatty() else 120)
    numbers = [
        number
        for number in (range(parsed.cases) if parsed.only is None else [parsed.only])
        if parsed.kind in (None, kind_of(number))
    ]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "first").mkdir()
        file = checkpoints.warm_up(program, folder / "first")
        material = checkpoints.prepare(program, file, folder / "material")
        # What is there now needs no counting in the forks, whose memory would be copied for it.
        gc.collect()
        gc.freeze()
        cases = ((number, make_case(parsed.seed, number, material)) for number in numbers)
        if parsed.only is not None and parsed.keep is not None:
            write_files(make_case(parsed.seed, parsed.only, material), parsed.keep)
        judged: list[Judged] = []
        try:
            for one in run_cases(
                cases, program, jobs=parsed.jobs, limit=parsed.limit, folder=folder / "cases"
            ):
                judged.append(one)
        except KeyboardInterrupt:
            console.print("interrupted; this is what was found so far")
    show(judged, parsed.seed, console)
    return 1 if any(one.verdict.result == FAULT for one in judged) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
