"""Runs ``train.py`` in forks of this process, and kills it."""

import os
import random
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Everything that a run imports is imported once, here; each run is a fork.
import gradpolicy.launch.run  # noqa: F401
from gradpolicy.errors import PolicyError
from gradpolicy.launch.app import main as train
from gradpolicy.launch.messages import TERMINATED

ROOT = Path(__file__).resolve().parents[2]
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


def run(command: Sequence[str], ranks: int, outputs: Path, kill: Kill) -> str | None:
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


def finish(command: Sequence[str], ranks: int, outputs: Path) -> Times:
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


def resuming(command: list[str], outputs: Path) -> list[str]:
    return [*command, "ckpt_path=last"] if _checkpoints(outputs) else command


def _checkpoints(outputs: Path) -> list[Path]:
    return list(outputs.glob("train/runs/*/checkpoints/last*.ckpt"))
