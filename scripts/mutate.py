"""Makes small changes to the package, one at a time, and counts how many of them the tests notice.

    python scripts/mutate.py --cases 10
    python scripts/mutate.py --room optim --room masks --cases 40 --seed 3
    python scripts/mutate.py --room optim --seed 3 --only 7
    python scripts/mutate.py --room flow --list

A change is one node of a file's syntax tree: a comparison turned, a number or a flag changed, a condition
negated, `and` for `or`, a sum for a difference, a statement left out, None returned. It is made in a clone
of the repository, never in the working tree, so that what is not committed is not tried. First the quick
tests of the module run (`tests/<room>/test_<module>.py`), then those of the room, and with --slow the
room's slow ones. Tests that run too long count as having noticed: most such changes loop without end. A
change that no test notices is printed with its place: write the test that is missing, or remove what nobody
needs. Some change nothing that can be seen; a person has to tell. Which changes are tried follows from the
seed and the committed code.
"""

import argparse
import ast
import copy
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
ROOMS = ("optim", "freezing", "masks", "flow", "lightning", "distributed")
OPPOSITES: dict[type, type] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
}
NOTICED, SURVIVED, TOO_LONG = "noticed", "survived", "ran too long"


@dataclass(frozen=True)
class Mutation:
    """One change.

    Attributes:
        file: The file, relative to the repository.
        line: The line of the node.
        before: The node's source, on one line.
        after: What takes its place.
        source: The whole file with the change.
    """

    file: str
    line: int
    before: str
    after: str
    source: str

    def __str__(self) -> str:
        return f"{self.file}:{self.line}  {self.before}  →  {self.after}"


def changed(node: ast.AST) -> ast.AST | None:
    """A node with a small change; None where there is none to make."""
    new: Any = copy.copy(node)
    match new:
        case ast.Compare(ops=[operator]) if type(operator) in OPPOSITES:
            new.ops = [OPPOSITES[type(operator)]()]
        case ast.BoolOp() | ast.BinOp() if type(new.op) in OPPOSITES:
            new.op = OPPOSITES[type(new.op)]()
        case ast.If() | ast.IfExp() | ast.While():
            new.test = ast.UnaryOp(ast.Not(), new.test)
        case ast.UnaryOp(op=ast.Not()):
            return new.operand
        case ast.Constant(value=bool(value)):
            new.value = not value
        case ast.Constant(value=int(value)):
            new.value = value + 1
        case ast.Constant(value=float(value)):
            new.value = value * 2 or 1.0
        case ast.Return(value=ast.expr()) if not isinstance(new.value, ast.Constant):
            new.value = ast.Constant(None)
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            return ast.Pass()
        case ast.Expr(value=ast.Call()) | ast.Continue() | ast.Break() | ast.Raise():
            return ast.Pass()
        case _:
            return None
    return new


def nodes_of(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run: neither annotations, nor docstrings, nor imports, nor what only a checker sees."""
    for name, field in ast.iter_fields(tree):
        children = field if isinstance(field, list) else [field]
        for child in children:
            is_for_checker = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test)
            if not isinstance(child, ast.AST) or name in ("annotation", "returns") or is_for_checker:
                continue
            if isinstance(child, ast.JoinedStr):
                # Before Python 3.12 its parts do not know where they stand.
                continue
            yield child
            yield from nodes_of(child)


def mutations_of(root: Path, file: str) -> list[Mutation]:
    """Every change to a file, in the order of its source."""
    source = (root / file).read_text()
    data = source.encode()
    starts = [0]
    for line in data.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = []
    for node in nodes_of(ast.parse(source)):
        new = changed(node)
        if new is None or not isinstance(node, ast.stmt | ast.expr):
            continue
        begin = starts[node.lineno - 1] + node.col_offset
        end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
        if isinstance(node, ast.If | ast.While) and isinstance(new, ast.If | ast.While):
            # The condition alone changes, so that the lines below stay where they are.
            test, new = node.test, new.test
            begin = starts[test.lineno - 1] + test.col_offset
            end = starts[(test.end_lineno or 0) - 1] + (test.end_col_offset or 0)
        written = ast.unparse(ast.fix_missing_locations(new))
        # In brackets an expression is one whatever stands round it.
        written = f"({written})" if isinstance(new, ast.expr) else written
        mutated = (data[:begin] + written.encode() + data[end:]).decode()
        before = " ".join(data[begin:end].decode().split())
        found.append(Mutation(file, node.lineno, before[:70], written[:70], mutated))
    return found


def chosen(root: Path, room: str, cases: int, seed: int) -> list[Mutation]:
    """So many changes to a room, each equally likely."""
    folder = root / "gradpolicy" / room
    files = sorted(path.relative_to(root).as_posix() for path in folder.rglob("*.py"))
    every = [mutation for file in files for mutation in mutations_of(root, file)]
    # Shuffled, so that a change keeps its number however many are tried.
    random.Random(f"{seed}/{room}").shuffle(every)
    return every[:cases]


def tests_of(root: Path, file: str) -> list[list[str]]:
    """What to run, the nearest first: the module's own tests, then those of its room."""
    parts = Path(file).parts
    nearest = [
        path.relative_to(root).as_posix() for path in root.glob(f"tests/{parts[1]}/**/test_{parts[-1]}")
    ]
    room = f"tests/{parts[1]}"
    return [nearest, [room, *(f"--ignore={path}" for path in nearest)]] if nearest else [[room]]


def passes(root: Path, tests: Sequence[str], seconds: float, which: str = "not slow") -> bool | None:
    """Whether tests with a mark pass in the clone; None where they run too long."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-m", which, "-n0", "-p", "no:cacheprovider"]
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, *tests],
        cwd=root,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        # 5: no test was collected.
        return process.wait(seconds) in (0, 5)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # What tests have started ends with them.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def judge(root: Path, mutation: Mutation, seconds: float, slow: float = 0.0) -> str:
    """Makes a change in the clone, runs the tests, and takes it back.

    Args:
        root: The clone.
        mutation: The change.
        seconds: For the quick tests.
        slow: For the room's slow ones, if these do not notice; 0: they do not run.
    """
    file = root / mutation.file
    original = file.read_text()
    file.write_text(mutation.source)
    until = time.monotonic() + seconds
    try:
        for tests in tests_of(root, mutation.file):
            passed = passes(root, tests, max(until - time.monotonic(), 1.0))
            if not passed:
                return NOTICED if passed is False else TOO_LONG
        passed = not slow or passes(root, [f"tests/{Path(mutation.file).parts[1]}"], slow, "slow")
        return SURVIVED if passed else NOTICED if passed is False else TOO_LONG
    finally:
        file.write_text(original)


def cloned(target: Path) -> Path:
    """A clone of what is committed."""
    subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(target)], check=True)
    return target


def results(counts: dict[str, dict[str, int]]) -> Table:
    """A row for each room."""
    drawn = Table(title="Changes that the tests noticed", title_justify="left")
    for heading in ("room", "changes", NOTICED, TOO_LONG, SURVIVED, "share noticed"):
        drawn.add_column(heading, justify="left" if heading == "room" else "right")
    for room, of_room in counts.items():
        total = sum(of_room.values())
        share = (of_room[NOTICED] + of_room[TOO_LONG]) / max(total, 1)
        numbers = (total, of_room[NOTICED], of_room[TOO_LONG], of_room[SURVIVED])
        drawn.add_row(room, *map(str, numbers), f"{share:.0%}")
    return drawn


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "--room", action="append", choices=ROOMS, help="a room; may be given again; default: all"
    )
    parser.add_argument("--cases", type=int, default=10, metavar="N", help="changes a room (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="which changes (default: 0)")
    parser.add_argument("--only", type=int, metavar="NUMBER", help="one change of each room, by its number")
    parser.add_argument("--list", action="store_true", help="print the changes, and run nothing")
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help="for the tests of a change (default: a minute and four times what they take without)",
    )
    parser.add_argument(
        "--slow",
        type=float,
        default=0.0,
        metavar="SECONDS",
        help="run the room's slow tests too, for at most so long, where the others notice nothing",
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the program; 1 where a change survived, 2 where tests fail without any."""
    options = parsed(arguments)
    console = Console()
    counts: dict[str, dict[str, int]] = {}
    with tempfile.TemporaryDirectory(prefix="mutate-") as folder:
        root = cloned(Path(folder) / "clone")
        for room in options.room or ROOMS:
            limit = options.limit
            if not options.list:
                begun = time.monotonic()
                if not passes(root, [f"tests/{room}"], 1800.0):
                    console.print(f"{room}: its tests fail without any change; nothing was tried")
                    return 2
                limit = limit or 60.0 + 4 * (time.monotonic() - begun)
            cases = chosen(root, room, max(options.cases, (options.only or 0) + 1), options.seed)
            of_room = dict.fromkeys((NOTICED, SURVIVED, TOO_LONG), 0)
            for number, mutation in enumerate(cases):
                if options.only not in (None, number):
                    continue
                verdict = "" if options.list else judge(root, mutation, limit, options.slow)
                if not options.list:
                    of_room[verdict] += 1
                console.print(
                    f"{room} {number}: {verdict} {escape(str(mutation))}", highlight=False, soft_wrap=True
                )
            counts[room] = of_room
    if options.list:
        return 0
    console.print(results(counts))
    return int(any(of_room[SURVIVED] for of_room in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
