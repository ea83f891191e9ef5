"""Runs the program within the test's own process, a second a run, or as a process of its own."""

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from gradpolicy.app import cli
from gradpolicy.app.launch import main
from gradpolicy.insight.run_files import RESULT, Result

ROOT = Path(__file__).parents[2]
CONF = ROOT / "conf"

# Two batches of each kind, nothing printed but tables, and no more loggers than needed.
SHORT = (
    "trainer.max_epochs=1",
    "trainer.limit_train_batches=2",
    "trainer.limit_val_batches=1",
    "trainer.limit_test_batches=1",
    "trainer.accelerator=cpu",
)
QUICK = (
    *SHORT,
    "logger=csv",
    "callbacks=model_checkpoint",
    "extras.report=false",
)


@dataclass
class Ended:
    """How a run of the program ended."""

    code: int
    out: str
    err: str
    folder: Path

    @property
    def run(self) -> Path:
        """The one run directory that it left."""
        (found,) = self.folder.glob("*/runs/*")
        return found

    @property
    def result(self) -> Result:
        """What it recorded."""
        return Result.load(self.run / RESULT)

    @property
    def completed(self) -> "Ended":
        """The same, if nothing went wrong."""
        assert self.code == 0, self.err
        return self

    @property
    def left_nothing(self) -> bool:
        """Whether it left no file."""
        return not self.folder.exists() or not any(self.folder.rglob("*"))

    @property
    def message(self) -> str:
        """The one message on the standard error stream."""
        (line,) = [line for line in self.err.splitlines() if line.startswith("error:")]
        return line.removeprefix("error: ")

    @property
    def refusal(self) -> str:
        """The message of a run that wrong input ended before it left anything."""
        assert self.code == 2
        assert self.left_nothing
        return self.message


@pytest.fixture
def train(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    """Runs the program here; each call has a folder of its own unless one is given."""
    calls = iter(range(1000))

    def run(*overrides: str, quick: bool = True, folder: Path | None = None) -> Ended:
        place = folder or tmp_path / f"outputs{next(calls)}"
        capfd.readouterr()
        arguments = [f"paths.log_dir={place}", *(QUICK if quick else ()), *overrides]
        code = main(CONF, arguments)
        out, err = capfd.readouterr()
        return Ended(code, out, err, place)

    return run


def heed_interrupts() -> None:
    """Undoes in a child what a shell does to programs in the background: they ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def start(folder: Path, *command: str, launcher: tuple[str, ...] = (), **environment: str) -> Popen:
    """Starts a program of this project as a person does."""
    return Popen(
        [*(launcher or (sys.executable,)), *command],
        stdout=PIPE,
        stderr=PIPE,
        text=True,
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        preexec_fn=heed_interrupts,
    )


def end(process: Popen, folder: Path) -> Ended:
    """Waits until a program has ended."""
    out, err = process.communicate(timeout=200)
    return Ended(process.returncode, out, err, folder)


def stop_when(process: Popen, made: Callable[[], bool], number: signal.Signals, folder: Path) -> Ended:
    """Sends a program a signal as soon as it has made something."""
    deadline = time.monotonic() + 150
    while not made() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(number)
    return end(process, folder)


@pytest.fixture
def train_process(tmp_path: Path) -> Callable[..., Ended]:
    """Runs the program as a person does."""

    def run(*overrides: str, launcher: tuple[str, ...] = ()) -> Ended:
        place = tmp_path / "outputs"
        command = (f"{ROOT}/train.py", f"paths.log_dir={place}", *QUICK, *overrides)
        return end(start(tmp_path, *command, launcher=launcher), place)

    return run


@pytest.fixture
def refusal(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command with wrong input, and gives the one line that it says."""

    def run(*words: str, config_dir: Path = CONF) -> str:
        capsys.readouterr()
        assert cli.main(list(words), config_dir) == 2
        said = capsys.readouterr().err
        assert said.startswith("error: ")
        assert said.count("\n") == 1
        return said.removeprefix("error: ").strip()

    return run
