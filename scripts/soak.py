"""Kills a training run again and again at random moments and asks whether anybody could tell.

    python scripts/soak.py --kills 30
    python scripts/soak.py --kills 5 --ranks 2 --workers 2 --accumulate 2

A run of ``train.py`` is left alone once. Then the same run is killed (SIGKILL, all its processes at once, and
on one process sometimes SIGTERM) at moments drawn at random, while it starts, trains and tests, and started
again each time with ``ckpt_path=last``, as a person does: with the default callbacks, into a new directory.
In the end both must hold the same bits in each checkpoint (weights, moments, masks, ages, schedulers, random
states, loop counters, best scores), the same rows in ``metrics.csv``, and the same numbers in
``result.json``. A run that comes to its end before it was killed often enough is compared, and the next one
begins.
"""

import argparse
import csv
import json
import os
import random
import re
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count, zip_longest
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    # Ctrl-C while the rest is imported: nothing has begun, so there is nothing to say.
    signal.signal(signal.SIGINT, lambda *_: os._exit(130))

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor

# Everything that a run imports is imported once, here; each run is a fork.
import gradpolicy.launch.run  # noqa: F401
from gradpolicy.distributed.sharded_checkpoint import read_as_one
from gradpolicy.errors import PolicyError
from gradpolicy.launch.app import main as train
from gradpolicy.launch.messages import TERMINATED
from gradpolicy.launch.results import RESULT, Result

ROOT = Path(__file__).resolve().parents[1]
# Where in a path a run's directory ends: what stands before differs from life to life, and means nothing.
RUN = re.compile(r".*/runs/[^/]+/")
# A kill may be drawn from all the time that a run takes, or be meant for its beginning or for its test.
ANY, START, TEST = "any", "start", "test"


@dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        ranks: Processes that train together.
        workers: Loader processes of each.
        accumulate: Batches to an update.
        epochs: Length of the run.
        save_every: Updates between two checkpoints; 0: one after each validation, as by default.
        overrides: More for the command line of ``train.py``.
    """

    ranks: int = 1
    workers: int = 0
    accumulate: int = 1
    epochs: int = 6
    save_every: int = 0
    overrides: tuple[str, ...] = ()

    def command(self, outputs: Path) -> list[str]:
        """The command line of ``train.py``."""
        often = f"+callbacks.last_checkpoint.every_n_train_steps={self.save_every}"
        return [
            f"paths.log_dir={outputs}",
            f"trainer={'cpu' if self.ranks == 1 else 'ddp_sim'}",
            f"trainer.max_epochs={self.epochs}",
            f"trainer.accumulate_grad_batches={self.accumulate}",
            "trainer.log_every_n_steps=1",
            "trainer.limit_train_batches=5",
            "trainer.limit_val_batches=2",
            "trainer.limit_test_batches=2",
            "trainer.enable_progress_bar=false",
            f"data.workers={self.workers}",
            "data.batch_size=32",
            # Too large: the best is seen in the middle, where a resumed run must not forget it.
            "optimizer.lr=0.3",
            "logger=csv",
            "+logger.csv.flush_logs_every_n_steps=1",
            *([often] if self.save_every else []),
            "extras.plan=false",
            "extras.print_config=false",
            *self.overrides,
        ]


@dataclass(frozen=True)
class Times:
    """How long a run takes that is left alone: seconds to its first checkpoint, to its test, to its end."""

    first: float
    test: float
    end: float

    def draw(self, random_state: random.Random) -> tuple[str, float]:
        """A moment for a kill: what it is meant for, and how long after the start or the test's beginning."""
        aim = random_state.choices((ANY, START, TEST), (7, 1, 2))[0]
        length = {ANY: self.end, START: self.first, TEST: self.end - self.test}[aim]
        return aim, random_state.uniform(0.0, 1.0) * length


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
    times = _finish(setting.command(alone), setting.ranks, alone)
    draw = random.Random(seed)
    done: Counter[str] = Counter()
    for life in count():
        if done.total() >= kills:
            break
        killed = folder / f"killed{life}"
        while done.total() < kills:
            number = signal.SIGTERM if setting.ranks == 1 and draw.random() < 0.2 else signal.SIGKILL
            kill = Kill(*times.draw(draw), number)
            where = _run(_resuming(setting.command(killed), killed), setting.ranks, killed, kill)
            if where is None:
                break
            done[where] += 1
            print(f"{number.name} {done.total()} of {kills} {where}", flush=True)
        _finish(_resuming(setting.command(killed), killed), setting.ranks, killed)
        found = compare(alone, killed)
        if found:
            return found
    print(", ".join(f"{number} {where}" for where, number in done.items()))
    return []


# ---- running, killing


@dataclass(frozen=True)
class Kill:
    """When a run is killed, and by what signal.

    Attributes:
        aim: ``TEST`` for a moment after the test began, else one after the start.
        after: The seconds.
        number: The signal.
    """

    aim: str
    after: float
    number: signal.Signals


class Ranks:
    """The processes of a run, each a fork of this one.

    Args:
        command: The command line of ``train.py``.
        ranks: How many.
    """

    def __init__(self, command: Sequence[str], ranks: int) -> None:
        self.command = command
        self.told = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self.began = time.monotonic()
        self.test: float | None = None
        self.codes: dict[int, int] = {}
        # What torchrun's agent has: the ranks agree there on the run's directory.
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
        self.testing, tells = os.pipe()
        os.set_blocking(self.testing, False)
        self.children = [self._fork(rank, ranks, tells) for rank in range(ranks)]
        os.close(tells)

    def running(self) -> bool:
        """Looks at the processes; whether any is left."""
        for child in self.children:
            if child not in self.codes:
                found, status = os.waitpid(child, os.WNOHANG)
                self.codes |= {child: os.waitstatus_to_exitcode(status)} if found else {}
        if self.test is None:
            with suppress(BlockingIOError):
                self.test = time.monotonic() if os.read(self.testing, 1) else None
        return len(self.codes) < len(self.children)

    def kill(self, number: signal.Signals) -> None:
        """Sends all that are left a signal; with SIGKILL also to their loader processes."""
        for child in self.children:
            if child not in self.codes:
                (os.killpg if number is signal.SIGKILL else os.kill)(child, number)

    def close(self, killed: bool) -> bool:
        """Ends the watch; says whether the run came to its end.

        Raises:
            PolicyError: If it failed by itself.
        """
        os.close(self.testing)
        ends = (0, *((-signal.SIGKILL, -signal.SIGTERM, TERMINATED) if killed else ()))
        failed = [code for code in self.codes.values() if code not in ends]
        with self.told:
            self.told.seek(0)
            if failed:
                words = f"failed with exit codes {failed}:\n{self.told.read()}"
                raise PolicyError(f"{' '.join(self.command)}\n{words}")
        return not any(self.codes.values())

    def _fork(self, rank: int, ranks: int, tells: int) -> int:
        """Starts a rank in a process group of its own, so that its loader processes die with it."""
        child = os.fork()
        # By both: neither may be the first to need it.
        with suppress(OSError):
            os.setpgid(child, child)
        if child:
            return child
        if self.store is not None:
            os.environ |= {
                **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
                **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
                "GROUP_RANK": "0",
                "TORCHELASTIC_RUN_ID": "soak",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
                "TORCHELASTIC_RESTART_COUNT": "0",
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(self.store.port),
            }
            # Lightning read it when it was imported, which a process of torchrun's does by itself.
            rank_zero_only.rank = rank  # type: ignore[attr-defined]
        code = 1
        os.dup2(self.told.fileno(), 2)
        try:
            sys.stdout = open(os.devnull, "w")  # noqa: SIM115
            sys.argv = [str(ROOT / "train.py"), *self.command]
            _tell_of_test(tells)
            code = train(ROOT / "conf", self.command)
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)


def _tell_of_test(pipe: int) -> None:
    test = Trainer.test

    def telling(*positional: Any, **named: Any) -> Any:
        os.write(pipe, b"t")
        return test(*positional, **named)

    Trainer.test = telling  # type: ignore[method-assign]


def _run(command: Sequence[str], ranks: int, outputs: Path, kill: Kill) -> str | None:
    """Runs ``train.py`` and kills it; says in what, or None where it came to its end before."""
    run = Ranks(command, ranks)
    where = None
    while run.running():
        start = run.test if kill.aim == TEST else run.began
        if where is None and start is not None and time.monotonic() > start + kill.after:
            where = (
                "while it tested"
                if run.test is not None
                else "while it trained"
                if _checkpoints(outputs)
                else "before its first checkpoint"
            )
            run.kill(kill.number)
        time.sleep(0.005)
    return None if run.close(killed=where is not None) else where


def _finish(command: Sequence[str], ranks: int, outputs: Path) -> Times:
    run = Ranks(command, ranks)
    first = 0.0
    while run.running():
        if not first and _checkpoints(outputs):
            first = time.monotonic()
        time.sleep(0.005)
    if not run.close(killed=False) or run.test is None:
        raise PolicyError("the run was killed by somebody else")
    end = time.monotonic()
    return Times(first - run.began, run.test - run.began, end - run.began)


def _resuming(command: list[str], outputs: Path) -> list[str]:
    return [*command, "ckpt_path=last"] if _checkpoints(outputs) else command


def _checkpoints(outputs: Path) -> list[Path]:
    return list(outputs.glob("train/runs/*/checkpoints/last*.ckpt"))


# ---- comparing


def compare(first: Path, second: Path) -> list[str]:
    """Where the newest runs below two folders differ: checkpoints, log and results; in words."""
    one, other = (max((folder / "train/runs").iterdir()) for folder in (first, second))
    names = [sorted(path.name for path in run.glob("checkpoints/*")) for run in (one, other)]
    if names[0] != names[1]:
        return [f"checkpoints: {names[0]} became {names[1]}"]
    found = []
    for name in names[0]:
        before, after = (_content(run / "checkpoints" / name) for run in (one, other))
        found += differences(before, after, name)
    before, after = (Result.load(run / RESULT) for run in (one, other))
    found += differences(before.metrics, after.metrics, f"{RESULT}.metrics")
    found += differences(before.optimized, after.optimized, f"{RESULT}.optimized")
    rows = zip_longest(_logged(one), _logged(other))
    return found + [f"metrics.csv, row {row}: {a} became {b}" for row, (a, b) in enumerate(rows, 1) if a != b]


def differences(first: Any, second: Any, place: str = "") -> list[str]:
    """The places in which two checkpoints differ, bit for bit, but for the directories of their runs."""
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        # What stands beside the shards may be a part of what all ranks hold.
        first, second = (each.to_local() if isinstance(each, DTensor) else each for each in (first, second))
        same = first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [f"{place}: {_shown(first)} became {_shown(second)}"]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        first, second = ({_plain(key): value for key, value in each.items()} for each in (first, second))
        keys = list(dict.fromkeys([*first, *second]))
        missing = [f"{place}.{key}: only in one of them" for key in keys if (key in first) != (key in second)]
        both = [key for key in keys if key in first and key in second]
        return missing + [
            line for key in both for line in differences(first[key], second[key], f"{place}.{key}")
        ]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{place}[{index}]")]
    return [] if _plain(first) == _plain(second) else [f"{place}: {first!r} became {second!r}"]


def _content(checkpoint: Path) -> Any:
    return read_as_one(checkpoint) if checkpoint.is_dir() else torch.load(checkpoint, weights_only=True)


def _plain(value: Any) -> Any:
    """A path within its run's directory; anything else as it is."""
    return RUN.sub("", value) if isinstance(value, str) else value


def _logged(run: Path) -> list[dict[str, str]]:
    with next(run.rglob("metrics.csv")).open(newline="") as file:
        return list(csv.DictReader(file))


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with sum {tensor.double().sum().item():.9g}"


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
