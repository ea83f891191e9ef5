"""Compiles the C sources: once a processor, kept in a cache folder, never a condition for running."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
import warnings
from pathlib import Path

from gradpolicy.machinery import jitting

FLAGS = ("-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINK_FLAGS = ("-shared", "-fPIC", "-pthread", "-lm")
# Torch has loaded OpenMP already: its threads are used, none are added. Not every compiler has it.
THREAD_FLAGS = ("-fopenmp",)
# Set to 0, no C is compiled.
SWITCH = "GRADPOLICY_NATIVE"
said: list[str] = []
"""Why there is no C library, once that was said."""


def compiled(source: Path) -> ctypes.CDLL | None:
    """The library made of a C source; None, and one warning for all sources, where it cannot be had.

    Args:
        source: The C file; it may include others of its folder.
    """
    compiler = os.environ.get("CC") or next(filter(shutil.which, ("cc", "gcc", "clang")), None)
    if os.environ.get(SWITCH) == "0":
        reason = f"{SWITCH}=0"
    elif compiler is None:
        reason = "no C compiler was found"
    else:
        try:
            return ctypes.CDLL(str(_build_somehow(source, compiler)))
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            reason = f"{compiler} failed: {output.strip()[:300]}"
    if not said:
        said.append(reason)
        warnings.warn(f"gradpolicy: {_consequence()} ({reason})", stacklevel=2)
    return None


def _consequence() -> str:
    """What happens without a C compiler."""
    hindrance = jitting.hindrance()
    if hindrance is None:
        return (
            "masked updates and random masks run in loops that numba compiles instead of the C kernel: "
            "up to twice the time, and some seconds for the first step"
        )
    return (
        "masked updates and random masks run on plain torch operations, at over twenty times the time, "
        f"for lack of the C kernel and of numba: {hindrance}"
    )


def _build_somehow(source: Path, compiler: str) -> Path:
    """With threads where the compiler can, else without."""
    try:
        return _build(source, compiler, (*FLAGS, *THREAD_FLAGS))
    except subprocess.CalledProcessError:
        return _build(source, compiler, FLAGS)


def _build(source: Path, compiler: str, flags: tuple[str, ...]) -> Path:
    """Compiles, or finds what was compiled before.

    Raises:
        OSError, subprocess.SubprocessError: If there is no compiler, or it fails.
    """
    texts = [path.read_text() for path in sorted(source.parent.glob("*.c"))]
    parts = [*texts, source.name, compiler, *flags, platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    library = _cache_folder() / f"{source.stem}-{digest}.so"
    if not library.exists():
        # Under a name of its own until it is whole: other processes may be looking for it.
        fresh = library.with_suffix(f".{os.getpid()}")
        command = [compiler, *flags, str(source), "-o", str(fresh), *LINK_FLAGS]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
        os.replace(fresh, library)
    return library


def _cache_folder() -> Path:
    """A folder that only this user can write to: what lies in it is run."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "gradpolicy"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(folder, os.W_OK):
            return folder
    except OSError:
        pass
    return Path(tempfile.mkdtemp(prefix="gradpolicy-"))


def _processor() -> str:
    """What compiled code depends on: it is built for this very processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
