"""Reads damaged files and takes wrong values, which Hypothesis draws, and shrinks what fails.

    python scripts/fuzz.py --cases 2000
    python scripts/fuzz.py --seed 3 --kind files

The files are data: checkpoints, deltas, adapters, and what a run leaves. The values are arguments of
policies, masks and schedules in Python. A case is right if it is accepted, or refused in one clear line.
Anything else is a fault: another error, a hang, a crash, code that ran, a file that was written or read
elsewhere, damage that was not noticed. Hypothesis keeps faults in `.hypothesis` and tries them first in the
next call. The exit code is 1 if there was a fault.

A case runs in a fork of this process, in its own folder, with everything imported.
"""

import argparse
import gc
import os
import re
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

import gradpolicy as gp
from fuzzing import files, values
from fuzzing.running import FAULT, RESULTS, Case, run_case

KEPT = Path(__file__).resolve().parents[1] / ".hypothesis" / "fuzz"
# The strategies that the processes draw from; set before they are forked.
STRATEGIES: dict[str, SearchStrategy[Case]] = {"values": values.cases()}


def fuzz(kind: str, number: int, cases: int, limit: float) -> Counter[str]:
    """Run so many cases; print each sort of fault with the smallest case that shows it.

    Returns:
        The number of cases with each result, including those of shrinking.
    """
    counts: Counter[str] = Counter()

    # Below the settings; above them it would remove the database.
    @settings(
        max_examples=cases,
        deadline=None,
        database=DirectoryBasedExampleDatabase(KEPT),
        suppress_health_check=list(HealthCheck),
        phases=[Phase.reuse, Phase.generate, Phase.shrink],
    )
    @seed(number)
    @given(STRATEGIES[kind])
    def every_case_is_right(case: Case) -> None:
        result, wrong = run_case(case, limit)
        counts[result] += 1
        if result == FAULT:
            # Hypothesis shrinks each type of error separately.
            sort = re.sub(r"'[^']*'|0x[0-9a-f]+|\d+", "…", wrong)[:60]
            raise _fault(sort)(f"fault: {case.what}\n  {wrong}")

    try:
        every_case_is_right()
    except BaseExceptionGroup as several:
        print(*several.exceptions, sep="\n", flush=True)
    except AssertionError as one:
        print(one, flush=True)
    return counts


@cache
def _fault(sort: str) -> type[AssertionError]:
    return type("Fault", (AssertionError,), {"sort": sort})


def main(arguments: Sequence[str]) -> int:
    """Run the program; the exit code is 1 if there was a fault."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=200, help="how many (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of what is drawn (default: %(default)s)")
    parser.add_argument("--kind", choices=("files", "values"), help="only cases of this kind")
    parser.add_argument("--jobs", type=int, default=2, help="cases at a time (default: %(default)s)")
    parser.add_argument("--limit", type=float, default=120, help="seconds for a case (default: %(default)s)")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        STRATEGIES["files"] = files.cases(files.prepare(Path(folder)))
    values.train(gp.masks.Random(0.5))
    kinds = [options.kind] if options.kind else list(STRATEGIES)
    cases = max(1, options.cases // options.jobs // len(kinds))
    # Existing objects need no garbage collection in the forks, which would copy their memory.
    gc.collect()
    gc.freeze()
    began = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("fork")) as pool:
        shares = [
            pool.submit(fuzz, kind, options.seed * 1000 + job, cases, options.limit)
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
