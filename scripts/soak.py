"""Kills a training run again and again at random moments and asks whether anybody could tell.

    python scripts/soak.py --kills 30
    python scripts/soak.py --kills 5 --ranks 2 --workers 2 --accumulate 2

A run of ``train.py`` is left alone once. Then the same run is killed (SIGKILL, all its processes at once, and
on one process sometimes SIGTERM) at moments drawn at random, while it starts, trains and tests, and started
again each time with ``ckpt_path=last``, as a person does: with the default callbacks, into a new directory.
In the end both must hold the same bits in each checkpoint (weights, moments, masks, ages, schedulers, random
states, loop counters, best scores), the same rows in ``metrics.csv`` and ``record.jsonl``, and the same
numbers in ``result.json``. A run that comes to its end before it was killed often enough is compared, and the
next one begins.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from itertools import count
from pathlib import Path

if __name__ == "__main__":
    # Ctrl-C while the rest is imported: nothing has begun, so there is nothing to say.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

from soaking.comparing import compare
from soaking.running import Kill, Setting, finish, resuming, run


def soak(setting: Setting, kills: int, folder: Path, *, seed: int = 0) -> list[str]:
    """Compares a run that was killed with one that was left alone.

    Args:
        setting: What is run.
        kills: How often it is killed.
        folder: Where both runs write.
        seed: Draws the moments.

    Returns:
        The differences, in words; empty where there is none.
    """
    alone = folder / "alone"
    times = finish(setting.command(alone), setting.ranks, alone)
    draw = random.Random(seed)
    done: Counter[str] = Counter()
    for life in count():
        if done.total() >= kills:
            break
        killed = folder / f"killed{life}"
        while done.total() < kills:
            number = signal.SIGTERM if setting.ranks == 1 and draw.random() < 0.2 else signal.SIGKILL
            kill = Kill(*times.draw(draw), number)
            where = run(resuming(setting.command(killed), killed), setting.ranks, killed, kill)
            if where is None:
                break
            done[where] += 1
            print(f"{number.name} {done.total()} of {kills} {where}", flush=True)
        finish(resuming(setting.command(killed), killed), setting.ranks, killed)
        found = compare(alone, killed)
        if found:
            return found
    print(", ".join(f"{number} {where}" for where, number in done.items()))
    return []


def main(arguments: Sequence[str]) -> int:
    """Runs the program; the exit code is 1 where there was a difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument(
        "--save-every", type=int, default=0, help="updates between two checkpoints; 0: after each validation"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="more for the command line of train.py")
    parsed = parser.parse_args(arguments)
    setting = Setting(
        parsed.ranks,
        parsed.workers,
        parsed.accumulate,
        parsed.epochs,
        parsed.save_every,
        tuple(parsed.overrides),
    )
    with tempfile.TemporaryDirectory() as folder:
        found = soak(setting, parsed.kills, Path(folder), seed=parsed.seed)
    print(
        "\n".join(found[:20])
        or f"{parsed.kills} kills, not one bit of difference: {json.dumps(vars(parsed))}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
