"""Runs a case in a fork of this process, in its own folder, monitored and with limits."""

import gc
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

import gradpolicy.launch.run as launch
from fuzzing.case import Case

# A function of the command line that returns the exit code.
Program = Callable[[Sequence[str]], int]

MEMORY = 6 * 2**30
# The limit of processes, which cases do not reach, except with very many loader processes.
MOST_FORKS = 4

STARTS_PROGRAMS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn"}
TALKS = {"socket.connect", "socket.getaddrinfo", "urllib.Request", "ftplib.connect", "http.client.connect"}
# The indices of output paths in the arguments of audit events.
WRITES = {
    "os.remove": (0,),
    "os.rmdir": (0,),
    "os.mkdir": (0,),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
    "os.truncate": (0,),
    "os.chmod": (0,),
    "shutil.rmtree": (0,),
}


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case.

    Attributes:
        code: The exit code; negative for the signal that ended it; None after a timeout.
        out: The standard output stream.
        err: The standard error stream.
        forbidden: Forbidden actions that it did or tried: starting programs, writing outside its folder.
        changed: New, changed and deleted files in its folder.
        config: The composed config that was run; None if none was.
        seconds: The duration.
    """

    code: int | None
    out: str = ""
    err: str = ""
    forbidden: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    seconds: float = 0.0


def run_case(case: Case, program: Program, limit: float = 300) -> Outcome:
    """Run one case and wait for it; kill it after the given number of seconds."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = place / "folder"
        for directory in (folder, place / "temporary"):
            directory.mkdir()
        for file, content in case.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        for stream in ("out", "err", "notes"):
            (place / stream).touch()
        before, began = snapshot(folder), time.monotonic()
        process = get_context("fork").Process(target=_run, args=(case, program, place))
        process.start()
        process.join(limit)
        ended = process.exitcode is not None
        # Its process group keeps its number as long as any process in it lives.
        with suppress(ProcessLookupError):
            os.killpg(process.ident or 0, signal.SIGKILL)
        process.join()
        notes = [json.loads(line) for line in (place / "notes").read_text().splitlines()]
        return Outcome(
            code=process.exitcode if ended else None,
            out=(place / "out").read_text(errors="replace"),
            err=(place / "err").read_text(errors="replace"),
            forbidden=tuple(note["forbidden"] for note in notes if "forbidden" in note),
            changed=tuple(_differences(before, snapshot(folder))),
            config=next((note["config"] for note in notes if "config" in note), None),
            seconds=time.monotonic() - began,
        )


def snapshot(folder: Path) -> dict[str, str]:
    """Return the hash of each file in a folder; an empty one for a directory."""
    return {
        str(path.relative_to(folder)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else ""
        )
        for path in sorted(folder.rglob("*"))
    }


def _differences(before: dict[str, str], after: dict[str, str]) -> Iterator[str]:
    for name in sorted({*before, *after}):
        if name not in after:
            yield f"{name} is gone"
        elif name not in before:
            yield f"{name} is new"
        elif before[name] != after[name]:
            yield f"{name} was changed"


# ---- in the fork


def _run(case: Case, program: Program, place: Path) -> None:
    """Run the program in the fork."""
    os.setpgid(0, 0)
    gc.disable()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    folder, temporary = place / "folder", place / "temporary"
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    os.chdir(folder)
    # The folder has untrusted modules, whose imports are monitored.
    sys.path.insert(0, str(folder))
    sys.argv = ["train.py", *case.arguments]
    out, err, notes = (os.open(place / name, os.O_WRONLY | os.O_APPEND) for name in ("out", "err", "notes"))
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), out, err)):
        os.dup2(stream, number)
    # As Python opens them.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    run = launch.run

    def noted(config: DictConfig, overrides: list[str]) -> Any:
        note = {"config": OmegaConf.to_container(config, resolve=False)}
        os.write(notes, json.dumps(note, default=str).encode() + b"\n")
        return run(config, overrides)

    launch.run = noted
    sys.addaudithook(Guard((folder, temporary), notes))
    sys.exit(program(case.arguments))


class Guard:
    """An audit hook that records and prevents forbidden actions.

    Args:
        places: The directories to which the case may write.
        notes: The descriptor of the file for records.
    """

    def __init__(self, places: tuple[Path, ...], notes: int) -> None:
        self.places = tuple(f"{place.resolve()}/" for place in places)
        self.notes = notes
        self.forks = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Record and prevent a forbidden event."""
        if event == "os.fork":
            self.forks += 1
        if (
            event in STARTS_PROGRAMS
            or event in TALKS
            or (event == "os.fork" and self.forks > MOST_FORKS)
            or (event == "open" and _opens_to_write(*arguments) and not self._is_own(arguments[0]))
            or (event in WRITES and not all(self._is_own(arguments[place]) for place in WRITES[event]))
        ):
            # Without the environment, which follows.
            what = f"{event}{arguments[:2]!r}"[:300]
            os.write(self.notes, json.dumps({"forbidden": what}).encode() + b"\n")
            raise PermissionError(f"prevented by the fuzzer: {what}")

    def _is_own(self, path: Any) -> bool:
        """Return True if the case may write to the path; a descriptor was checked when it was opened."""
        if isinstance(path, int) or path is None:
            return True
        absolute = os.path.realpath(os.fsdecode(path))
        # Nothing can be written below `/proc/nothing`, which some cases use.
        return (
            absolute == "/proc"
            or absolute.startswith(("/dev/", "/proc/nothing"))
            or f"{absolute}/".startswith(self.places)
        )


def _opens_to_write(path: Any, mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
