"""Runs a case in a fork of this process, in a folder of its own, and judges how it ended."""

import gc
import json
import os
import re
import resource
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

from gradpolicy.errors import PolicyError

ACCEPTED, REFUSED, FAULT = RESULTS = ("accepted", "refused in one clear line", "fault")
MEMORY = 6 * 2**30
LONGEST = 500
SECRET = b"a file outside of the folder, which nothing may read"
# A module whose import writes a file.
STRANGER = b"open('canary', 'w').close()\n"
# Messages of unexpected errors, not of checks.
STUMBLED = re.compile(
    r"\b(?:AssertionError|AttributeError|IndexError|KeyError|MemoryError|NameError|NotImplementedError|"
    r"RecursionError|UnboundLocalError|ZeroDivisionError)\b|weights_only="
)
STARTS_PROGRAMS = {"os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "pty.spawn"}
TALKS = {"socket.connect", "socket.getaddrinfo", "urllib.Request", "ftplib.connect", "http.client.connect"}
# The indices of output paths in the arguments of audit events.
WRITES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(("os.remove", "os.rmdir", "os.mkdir", "os.truncate", "os.chmod", "shutil.rmtree"), (0,)),
    "os.rename": (0, 1),
    "os.link": (1,),
    "os.symlink": (1,),
}
Content = bytes | Literal["a link", "a pipe"]


@dataclass(frozen=True)
class Case:
    """Something that reads files or takes values.

    Attributes:
        what: A description.
        action: It is called in the case's folder, may write to ``out`` there, and refuses by a PolicyError.
        must: The only right result, or an empty string.
        files: The files in the folder, by name; a link leads to a file elsewhere.
    """

    what: str
    action: Callable[[], object] = field(repr=False)
    must: str = ""
    files: Mapping[str, Content] = field(default_factory=dict, repr=False)


def run_case(case: Case, limit: float = 60) -> tuple[str, str]:
    """Run a case, which is killed after so many seconds; return one of `RESULTS`, and what is wrong."""
    with tempfile.TemporaryDirectory() as name:
        place = Path(name).resolve()
        for directory in ("folder/out", "temporary"):
            (place / directory).mkdir(parents=True)
        (place / "secret").write_bytes(SECRET)
        (place / "notes").touch()
        for file, content in {"stranger.py": STRANGER, **case.files}.items():
            path = place / "folder" / file
            path.parent.mkdir(parents=True, exist_ok=True)
            if isinstance(content, bytes):
                path.write_bytes(content)
            elif content == "a link":
                path.symlink_to(place / "secret")
            else:
                os.mkfifo(path)
        process = get_context("fork").Process(target=_run, args=(case, place))
        process.start()
        process.join(limit)
        code = process.exitcode
        # Its process group keeps its number as long as any process in it lives.
        with suppress(ProcessLookupError):
            os.killpg(process.ident or 0, signal.SIGKILL)
        process.join()
        notes = [json.loads(line) for line in (place / "notes").read_text().splitlines()]
        leaks = any(SECRET in path.read_bytes() for path in place.glob("folder/out/**/*") if path.is_file())
    result = next((note["result"] for note in notes if "result" in note), "")
    message = next((note["message"] for note in notes if "message" in note), "")
    forbidden = [note["forbidden"] for note in notes if "forbidden" in note]
    wrong = next(_wrong(case, code, result, message, [*forbidden, *(["a leak"] if leaks else [])]), "")
    return (FAULT, wrong) if wrong else (result, "")


def _wrong(case: Case, code: int | None, result: str, message: str, forbidden: list[str]) -> Iterator[str]:
    """Yield what is wrong, the worst first."""
    yield from (f"it did what no input may do: {each}" for each in forbidden)
    if code is None:
        yield "it hangs"
    elif code or not result:
        yield f"it ended with code {code}"
    if result == FAULT:
        yield message
    if case.must and result != case.must:
        yield f"{result}, but it must be {case.must}" + (f": {message}" if message else "")
    if result == REFUSED:
        if len(message.strip().splitlines()) != 1 or len(message) > LONGEST:
            yield f"the message is not one line of at most {LONGEST} characters: {message[:LONGEST]!r}"
        if stumbled := STUMBLED.search(message):
            yield f"the message is that of a program that stumbled ({stumbled[0].strip()}): {message}"


# ---- in the fork


def _run(case: Case, place: Path) -> None:
    os.setpgid(0, 0)
    gc.disable()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    os.environ["TMPDIR"] = str(place / "temporary")
    tempfile.tempdir, sys.dont_write_bytecode = None, True
    os.chdir(place / "folder")
    sys.path.insert(0, str(place / "folder"))
    notes = os.open(place / "notes", os.O_WRONLY | os.O_APPEND)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for number in range(3):
        os.dup2(nowhere, number)
    sys.addaudithook(Guard(place, notes))
    try:
        case.action()
        note = {"result": ACCEPTED}
    except PolicyError as error:
        note = {"result": REFUSED, "message": str(error)}
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)[-3:]
        places = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames))
        note = {"result": FAULT, "message": f"{type(error).__name__}: {str(error)[:LONGEST]} ({places})"}
    os.write(notes, json.dumps(note).encode() + b"\n")
    os._exit(0)


class Guard:
    """An audit hook that notes and prevents what no input may do.

    Args:
        place: The directory of the case, which may write to ``folder/out`` and ``temporary`` in it.
        notes: The descriptor of the file for notes.
    """

    def __init__(self, place: Path, notes: int) -> None:
        self.places = tuple(f"{place}/{name}/" for name in ("folder/out", "temporary"))
        self.secret, self.notes = str(place / "secret"), notes

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Note and prevent a forbidden event."""
        if (
            event in STARTS_PROGRAMS
            or event in TALKS
            or (event == "open" and self._is_wrong_to_open(*arguments))
            or (event in WRITES and not self._is_own_change(event, arguments))
        ):
            # Without the environment, which follows.
            what = f"{event}{arguments[:2]!r}"[:300]
            os.write(self.notes, json.dumps({"forbidden": what}).encode() + b"\n")
            raise PermissionError(f"prevented by the fuzzer: {what}")

    def _is_wrong_to_open(self, path: Any, mode: Any, flags: Any) -> bool:
        writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT
        writes = any(letter in mode for letter in "wax+") if isinstance(mode, str) else bool(flags & writing)
        if writes:
            return not self._is_own(path)
        return not isinstance(path, int) and self._real(path) == self.secret

    def _is_own_change(self, event: str, arguments: tuple[Any, ...]) -> bool:
        # What is removed by a name in an open directory, as by `shutil.rmtree`, was checked with that one.
        inside = event in ("os.remove", "os.rmdir") and arguments[1] >= 0
        return inside or all(self._is_own(arguments[place]) for place in WRITES[event])

    def _is_own(self, path: Any) -> bool:
        # A descriptor was checked when it was opened.
        if isinstance(path, int) or path is None:
            return True
        return f"{self._real(path)}/".startswith(("/dev/", *self.places))

    @staticmethod
    def _real(path: Any) -> str:
        return os.path.realpath(os.fsdecode(path))
