"""Compiles the C sources: once a processor, kept in a cache folder, never a condition for running."""

import ctypes
import hashlib
import os
import platform
import shutil
import stat
import subprocess
import tempfile
import warnings
from collections.abc import Iterator
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
    command = compiler()
    if os.environ.get(SWITCH) == "0":
        reason = f"{SWITCH}=0"
    elif not command:
        reason = "no C compiler was found"
    else:
        try:
            return ctypes.CDLL(str(_build_somehow(source, command)))
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            reason = f"{' '.join(command)} failed: {output.strip()[:300]}"
    if not said:
        said.append(reason)
        warnings.warn(f"gradpolicy: {_consequence()} ({reason})", stacklevel=2)
    return None


def compiler() -> list[str]:
    """The compiler and its own arguments, as of ``CC="ccache gcc"``; empty where there is none."""
    named = os.environ.get("CC")
    if named:
        return [named] if shutil.which(named) else named.split()
    return [name for name in ("cc", "gcc", "clang") if shutil.which(name)][:1]


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


def _build_somehow(source: Path, compiler: list[str]) -> Path:
    """With threads where the compiler can, else without."""
    try:
        return _build(source, compiler, (*FLAGS, *THREAD_FLAGS))
    except subprocess.CalledProcessError:
        return _build(source, compiler, FLAGS)


def _build(source: Path, compiler: list[str], flags: tuple[str, ...]) -> Path:
    """Compiles, or finds what was compiled before.

    Raises:
        OSError, subprocess.SubprocessError: If there is no compiler, or it fails.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(source.parent.glob("*.c"))]
    parts = [*texts, source.name, *compiler, *flags, platform.machine(), _processor()]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:20]
    library = _cache_folder() / f"{source.stem}-{digest}.so"
    if not library.exists():
        # Under a name of its own until it is whole: other processes may be looking for it.
        fresh = library.with_suffix(f".{os.getpid()}")
        command = [*compiler, *flags, str(source), "-o", str(fresh), *LINK_FLAGS]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=600)
        os.replace(fresh, library)
    return library


def _cache_folder() -> Path:
    """A folder that only this user can write to: what lies in it is run."""
    return next(filter(_is_made, _folders()), None) or Path(tempfile.mkdtemp(prefix="gradpolicy-"))


def _folders() -> Iterator[Path]:
    """Where a user's caches lie, and what serves processes without a home that they can write to."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(caches):  # a container's user may have no home
        yield Path(caches, "gradpolicy")
    if hasattr(os, "getuid"):
        yield Path(tempfile.gettempdir()) / f"gradpolicy-{os.getuid()}"


def _is_made(folder: Path) -> bool:
    """Whether a folder is there, made if need be, for this user to write to and for no other."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK)


def _processor() -> str:
    """What compiled code depends on: it is built for this very processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor()
