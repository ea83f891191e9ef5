"""Runs a case in a fork of this process, in a folder of its own, watched and within limits."""

import gc
import hashlib
import json
import os
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fuzzing.case import Case

# Takes the arguments of the command line, gives the exit code.
Program = Callable[[Sequence[str]], int]

MEMORY = 6 * 2**30
# No run of a case needs more; loader processes without number do.
MOST_FORKS = 4

STARTS_PROGRAMS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn"}
TALKS = {"socket.connect", "socket.getaddrinfo", "urllib.Request", "ftplib.connect", "http.client.connect"}
# Where in the event's arguments the paths stand that are written to.
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
    """What a case did.

    Attributes:
        code: The exit code; negative for the signal that ended it; None where the time was up.
        out: What it said on the standard output stream.
        err: What it said on the standard error stream.
        forbidden: What it did or tried to do that no config may: start programs, write elsewhere.
        changed: What is new, changed or gone in its folder, in words.
        config: The composed config that was run; None where none was.
        choices: The choice of each group.
        metrics: What the run recorded in its ``result.json``.
        seconds: How long it took.
    """

    code: int | None
    out: str = ""
    err: str = ""
    forbidden: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    config: dict[str, Any] | None = None
    choices: dict[str, Any] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    seconds: float = 0.0


def run_case(case: Case, program: Program, limit: float = 300) -> Outcome:
    """Run one case and wait for it; it is killed after so many seconds."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name)
        folder = place / "folder"
        said = {stream: place / stream for stream in ("out", "err", "told")}
        (place / "temporary").mkdir()
        for file, content in case.files.items():
            (folder / file).parent.mkdir(parents=True, exist_ok=True)
            (folder / file).write_bytes(content)
        folder.mkdir(exist_ok=True)
        before, began = snapshot(folder), time.monotonic()
        process = os.fork()
        if not process:
            _run(case, program, folder, place / "temporary", said)
        exited = _wait(process, limit)
        # What it has started; its number is its own until it was waited for.
        for kill in (os.killpg, os.kill):
            with suppress(ProcessLookupError):
                kill(process, signal.SIGKILL)
        _, status = os.waitpid(process, 0)
        text = {
            stream: path.read_text(errors="replace") if path.exists() else "" for stream, path in said.items()
        }
        told = [json.loads(line) for line in text["told"].splitlines()]
        ran: dict[str, Any] = next((line["ran"] for line in told if "ran" in line), {})
        results = list(folder.glob("outputs/**/result.json"))
        return Outcome(
            code=os.waitstatus_to_exitcode(status) if exited else None,
            out=text["out"],
            err=text["err"],
            forbidden=tuple(line["forbidden"] for line in told if "forbidden" in line),
            changed=tuple(_differences(before, snapshot(folder))),
            config=ran.get("config"),
            choices=ran.get("choices", {}),
            metrics=json.loads(results[0].read_text())["metrics"] if results else {},
            seconds=time.monotonic() - began,
        )


def _wait(process: int, limit: float) -> bool:
    deadline = time.monotonic() + limit
    while os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True


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


def _run(case: Case, program: Program, folder: Path, temporary: Path, said: dict[str, Path]) -> None:
    """Run the program in the fork, and end the process."""
    code = 1
    try:
        os.setpgid(0, 0)
        gc.disable()
        resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.environ["TMPDIR"] = str(temporary)
        tempfile.tempdir = None
        os.chdir(folder)
        # Where a stranger's modules lie: importing one is possible, and is seen.
        sys.path.insert(0, str(folder))
        sys.argv = ["train.py", *case.arguments]
        told = _redirect(said)
        _tell_config(told)
        sys.addaudithook(Guard((folder, temporary), told))
        code = program(case.arguments)
    except SystemExit as leaving:
        code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (OSError, ValueError):
                code = 1
        os._exit(code)


def _redirect(said: dict[str, Path]) -> int:
    """Send the output streams to files; return the descriptor of a third, for the harness's notes."""
    numbers = {
        name: os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600) for name, path in said.items()
    }
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(numbers["out"], 1)
    os.dup2(numbers["err"], 2)
    # As Python itself opens them.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", encoding="utf-8", errors="backslashreplace", closefd=False)  # noqa: SIM115
    return numbers["told"]


def _tell_config(told: int) -> None:
    """Note the config of the job that is run."""
    from hydra.core.hydra_config import HydraConfig
    from omegaconf import DictConfig, OmegaConf

    import gradpolicy.launch.run as door

    run = door.run

    def noted(config: DictConfig, overrides: list[str]) -> Any:
        known = HydraConfig.initialized()
        choices = OmegaConf.to_container(HydraConfig.get().runtime.choices) if known else {}
        ran = {"config": OmegaConf.to_container(config, resolve=False), "choices": choices}
        os.write(told, json.dumps({"ran": ran}, default=str).encode() + b"\n")
        return run(config, overrides)

    door.run = noted


class Guard:
    """An audit hook: notes and prevents what no config may do.

    Args:
        places: Where it may write.
        told: The descriptor of the file for notes.
    """

    def __init__(self, places: tuple[Path, ...], told: int) -> None:
        self.places = tuple(f"{place.resolve()}/" for place in places)
        self.told = told
        self.forks = 0

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note and prevent a forbidden event."""
        if event == "os.fork":
            self.forks += 1
        if (
            event in STARTS_PROGRAMS
            or event in TALKS
            or (event == "os.fork" and self.forks > MOST_FORKS)
            or (event == "open" and _opens_to_write(*arguments) and not self._is_own(arguments[0]))
            or (event in WRITES and not all(self._is_own(arguments[place]) for place in WRITES[event]))
        ):
            # What comes after is the environment, which is nobody's business.
            what = f"{event}{arguments[:2]!r}"[:300]
            os.write(self.told, json.dumps({"forbidden": what}).encode() + b"\n")
            raise PermissionError(f"prevented by the fuzzer: {what}")

    def _is_own(self, path: Any) -> bool:
        """Return True if it lies where the case may write; a descriptor was judged when it was opened."""
        if isinstance(path, int) or path is None:
            return True
        absolute = os.path.realpath(os.fsdecode(path))
        # Nothing can be written below `/proc/nothing`: some cases ask for just that.
        return (
            absolute == "/proc"
            or absolute.startswith(("/dev/", "/proc/nothing"))
            or f"{absolute}/".startswith(self.places)
        )


def _opens_to_write(path: Any, mode: Any, flags: Any) -> bool:
    if isinstance(mode, str):
        return any(letter in mode for letter in "wax+")
    return isinstance(flags, int) and bool(flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
