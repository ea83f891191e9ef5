"""Try command lines, policy files and checkpoints that Hypothesis draws, and shrink what is a fault.

    python scripts/fuzz.py --cases 2000
    python scripts/fuzz.py --seed 3 --kind checkpoint

A case has three possible results: it is accepted and right, it is refused in one clear line, and anything
else is a fault: a traceback, another exit code, a hang, a crash, a file left behind, code that ran, a value
that is not held, nonsense that was accepted. Hypothesis keeps a fault in `.hypothesis` and tries it first in
the next call; one that was mended belongs in `scripts/fuzzing/examples.yaml`. The exit code is 1 if there was
a fault.

A case runs in a fork of this process, in a folder of its own, with everything imported: what depends on a
fresh process, on more than one rank or on a GPU is not tried here. An accepted case held the values that it
was given, did nothing forbidden and left nothing behind; that does not mean that all of it is right.
"""

import argparse
import gc
import os
import re
import shlex
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from hypothesis.strategies import SearchStrategy

from fuzzing import checkpoints, commands, policies
from fuzzing.case import Case
from fuzzing.judging import FAULT, RESULTS, judge
from fuzzing.running import run_case
from gradpolicy.launch.app import main as train

KINDS = ("command", "policy", "checkpoint")
KEPT = Path(__file__).resolve().parents[1] / ".hypothesis" / "fuzz"
# The strategies that the processes draw from; set before they are forked.
STRATEGIES: dict[str, SearchStrategy[Case]] = {}


def program(arguments: Sequence[str]) -> int:
    """Run what is tried."""
    return train(commands.CONF, arguments)


def fuzz(strategy: SearchStrategy[Case], number: int, cases: int, limit: float) -> Counter[str]:
    """Try cases until there are enough; print each sort of fault with the smallest case that shows it.

    Returns:
        How often each result came about, shrinking included.
    """
    counts: Counter[str] = Counter()

    # Below the settings: above them it would take the database away.
    @settings(
        max_examples=cases,
        deadline=None,
        database=DirectoryBasedExampleDatabase(KEPT),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
    )
    @seed(number)
    @given(strategy)
    def every_case_is_right_or_refused(case: Case) -> None:
        outcome = run_case(case, program, limit)
        result, complaint = judge(case, outcome)
        counts[result] += 1
        if result == FAULT:
            # Hypothesis shrinks each type of error by itself.
            sort = re.sub(r"'[^']*'|0x[0-9a-f]+|\d+", "…", complaint)[:60]
            raise _fault(sort)(description(case, complaint, outcome.out + outcome.err))

    try:
        every_case_is_right_or_refused()
    except BaseExceptionGroup as several:
        print(*several.exceptions, sep="\n", flush=True)
    except AssertionError as one:
        print(one, flush=True)
    return counts


@cache
def _fault(sort: str) -> type[AssertionError]:
    return type("Fault", (AssertionError,), {"sort": sort})


def description(case: Case, complaint: str, output: str) -> str:
    """Describe a fault and what brings it about."""
    lines = [f"fault: {complaint[:600]}", f"  {case.what}, which {case.expectation}"]
    lines.append(f"  python train.py {shlex.join(case.arguments)[:1500]}")
    for name, content in case.files.items():
        if name.endswith(".yaml"):
            lines.append(f"  {name}:\n{content.decode(errors='backslashreplace')[:1500]}")
    lines += ["  its output:", *(f"    {line[:300]}" for line in output.strip().splitlines()[-12:])]
    return "\n".join(lines).encode("utf-8", "backslashreplace").decode()


def _share(kind: str, number: int, cases: int, limit: float) -> Counter[str]:
    return fuzz(STRATEGIES[kind], number, cases, limit)


def main(arguments: Sequence[str]) -> int:
    """Run the program; the exit code is 1 where there was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--kind", choices=KINDS, help="only cases of this kind")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=300, help="seconds for a case (default: %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        material = checkpoints.prepare(program, Path(folder))
    strategies = (commands.cases(), policies.cases(), checkpoints.cases(material))
    STRATEGIES.update(zip(KINDS, strategies, strict=True))
    kinds = [options.kind] if options.kind else KINDS
    cases = max(1, options.cases // options.jobs // len(kinds))
    # What there is now needs no counting in the forks, whose memory would be copied for it.
    gc.collect()
    gc.freeze()
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        shares = [
            pool.submit(_share, kind, options.seed * 1000 + job, cases, options.limit)
            for kind in kinds
            for job in range(options.jobs)
        ]
        counts = sum((share.result() for share in shares), Counter[str]())
    minutes = (time.monotonic() - began) / 60
    total = ", ".join(f"{counts[result]} {result}" for result in RESULTS)
    print(f"seed {options.seed}: {total}; {sum(counts.values()) / minutes:.0f} cases a minute")
    return 1 if counts[FAULT] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
