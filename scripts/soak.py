"""Kills a training run at random moments, resumes it, and compares it with an uninterrupted run.

    python scripts/soak.py --kills 30
    python scripts/soak.py --kills 5 --ranks 2 --workers 2 --accumulate 2

``train.py`` runs once without interruption. Then the same run is killed (SIGKILL to all its processes at
once; on one process sometimes SIGTERM) at random moments, while it starts, trains and tests, and resumed each
time with ``ckpt_path=last``, with the default callbacks. In the end both must have the same bits in each
checkpoint (weights, moments, masks, ages, schedulers, random states, loop counters, best scores), the same
rows in ``metrics.csv`` and ``record.jsonl``, and the same numbers in ``result.json``. A run that ends before
the number of kills is reached is compared, and another one starts.
"""

import argparse
import json
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import count
from pathlib import Path

from soaking.comparing import compare
from soaking.running import checkpoints, run


def command(options: argparse.Namespace, outputs: Path) -> list[str]:
    """Return the command line of ``train.py``, which resumes once there is a checkpoint."""
    return [
        f"paths.log_dir={outputs}",
        f"trainer={'cpu' if options.ranks == 1 else 'ddp_sim'}",
        f"trainer.max_epochs={options.epochs}",
        f"trainer.accumulate_grad_batches={options.accumulate}",
        "trainer.log_every_n_steps=1",
        "trainer.limit_train_batches=5",
        "trainer.limit_val_batches=2",
        "trainer.limit_test_batches=2",
        "trainer.enable_progress_bar=false",
        f"data.workers={options.workers}",
        "data.batch_size=32",
        # Too large, so that the best epoch is in the middle, and a resumed run must restore it.
        *([] if any(each.startswith("optimizer=") for each in options.overrides) else ["optimizer.lr=0.3"]),
        "logger=csv",
        "+logger.csv.flush_logs_every_n_steps=1",
        *(
            [f"+callbacks.last_checkpoint.every_n_train_steps={options.save_every}"]
            if options.save_every
            else []
        ),
        "extras.plan=false",
        "extras.traceback=true",
        *options.overrides,
        *(["ckpt_path=last"] if checkpoints(outputs) else []),
    ]


def soak(options: argparse.Namespace, folder: Path) -> list[str]:
    """Compare killed runs with an uninterrupted one.

    Returns:
        Descriptions of the differences; empty if there are none.
    """
    alone = folder / "alone"
    began = time.monotonic()
    run(command(options, alone), options.ranks)
    length = time.monotonic() - began
    draw, kills = random.Random(options.seed), 0
    for life in count():
        if kills == options.kills:
            break
        killed, ended = folder / f"killed{life}", False
        while not ended and kills < options.kills:
            number = signal.SIGTERM if options.ranks == 1 and draw.random() < 0.2 else signal.SIGKILL
            after = draw.uniform(0.0, length)
            ended = run(command(options, killed), options.ranks, after, number)
            if not ended:
                kills += 1
                print(f"{number.name} {kills} of {options.kills} after {after:.1f} s", flush=True)
        if not ended:
            run(command(options, killed), options.ranks)
        if found := compare(alone, killed):
            return found
    return []


def main(arguments: Sequence[str]) -> int:
    """Run the program; the exit code is 1 if there was a difference."""
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
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        found = soak(options, Path(folder))
    same = f"{options.kills} kills, not one bit of difference: {json.dumps(vars(options))}"
    print("\n".join(found[:20]) or same)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
