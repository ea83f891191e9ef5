"""Compiles the C sources when the package is installed, or at first use.

Only the standard library is used here: `setup.py` runs this file before anything is installed.
"""

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
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
LINK_FLAGS = ("-shared", "-fPIC", "-pthread", "-lm")
THREAD_FLAGS = ("-fopenmp",)
"""Torch has already loaded OpenMP, so no further threads are created. Not every compiler supports it."""
X86_64 = platform.machine().lower() in ("x86_64", "amd64")
TARGETS: dict[str, tuple[str, ...]] = {"default": ()}
"""Compiler flags for each level of processor, by torch's names of these levels."""
if X86_64:
    TARGETS["avx2"] = ("-mavx2",)
    TARGETS["avx512"] = ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mprefer-vector-width=512")
WINDOWS = os.name == "nt"
SWITCH = "GRADPOLICY_NATIVE"
"""If this environment variable is 0, the C kernels are not used."""
FOLDER = Path(__file__).parent
_said: list[str] = []
"""The reasons for missing C libraries of which a warning was given."""


def compiled(source: Path, **defines: str) -> ctypes.CDLL | None:
    """Return the library of a C source; None, after one warning for all sources, if it is not available.

    Args:
        source: the C file; it may include others.
        defines: the macros to define.
    """
    command = compiler()
    if os.environ.get(SWITCH) == "0":
        reason = f"{SWITCH}=0"
    else:
        try:
            return ctypes.CDLL(str(_found_or_built(source, defines, command)))
        except (OSError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error)
            reason = f"{' '.join(command)} failed: {output.strip()[:300]}" if command else str(error)
    if not _said:
        _said.append(reason)
        warnings.warn(
            "gradpolicy: masked updates and random masks run on plain torch operations, which takes them "
            f"ten times as long and more (docs/speed.md), for lack of the C kernels: {reason}",
            stacklevel=2,
        )
    return None


def build_all(folder: Path) -> list[Path]:
    """Compile every C source of the package for every target.

    Args:
        folder: the package's folder during installation; libraries are written beside their sources.

    Raises:
        OSError, subprocess.SubprocessError: if there is no compiler, or it fails.
    """
    command = compiler()
    units = [(*unit, target) for unit in _units() for target in TARGETS]

    def build(unit: tuple[Path, dict[str, str], str]) -> Path:
        source, defines, target = unit
        return _build(source, defines, command, target, folder / source.parent.relative_to(FOLDER) / "built")

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return list(pool.map(build, units))


def compiler() -> list[str]:
    """Return the compiler with its arguments, such as ``["ccache", "gcc"]``; empty if there is none."""
    named = os.environ.get("CC")
    if named:
        return [named] if shutil.which(named) else named.split()
    # MSVC has other flags, and gcc does not align the stack for AVX there (GCC bug 54412).
    names = () if WINDOWS else ("cc", "gcc", "clang")
    return [name for name in names if shutil.which(name)][:1]


def rule_defines(name: str) -> dict[str, str]:
    """Return the macros that compile the C file of one update rule in `optim/update_rules`."""
    return {"RULE": name, "RULE_FILE": f'"../../update_rules/{name}.c"'}


def _units() -> list[tuple[Path, dict[str, str]]]:
    """Return the source and the macros of every library."""
    native = FOLDER / "optim" / "kernels" / "native"
    rules = sorted((FOLDER / "optim" / "update_rules").glob("*.c"))
    updates = [(native / "update.c", rule_defines(rule.stem)) for rule in rules]
    return [(native / "blocks.c", {}), *updates, *((path, {}) for path in FOLDER.glob("tensors/*.c"))]


def _found_or_built(source: Path, defines: dict[str, str], command: list[str]) -> Path:
    """Return the library for this processor: installed, compiled before, or compiled now."""
    target = _target()
    name = _name(source, defines, target)
    installed = source.parent / "built" / name
    if installed.exists():
        return installed
    cache = _cache_folder()
    return cache / name if (cache / name).exists() else _build(source, defines, command, target, cache)


def _build(source: Path, defines: dict[str, str], command: list[str], target: str, folder: Path) -> Path:
    """Compile with OpenMP if the compiler supports it, otherwise without."""
    if not command:
        raise OSError("no C compiler was found")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / _name(source, defines, target)
    # Written under a temporary name, since other processes may load it.
    fresh = library.with_suffix(f".{os.getpid()}")
    given = [f"-D{key}={value}" for key, value in defines.items()]
    try:
        _run([*command, *FLAGS, *TARGETS[target], *THREAD_FLAGS, *given], source, fresh)
    except subprocess.CalledProcessError:
        _run([*command, *FLAGS, *TARGETS[target], *given], source, fresh)
    os.replace(fresh, library)
    return library


def _run(command: list[str], source: Path, library: Path) -> None:
    whole = [*command, str(source), "-o", str(library), *LINK_FLAGS]
    subprocess.run(whole, check=True, capture_output=True, text=True, timeout=600)


def _name(source: Path, defines: dict[str, str], target: str) -> str:
    """Return a name with a hash of everything that the library depends on."""
    folders = [source.parent, *([FOLDER / "optim" / "update_rules"] if defines else [])]
    paths = [path for folder in folders for path in sorted(folder.glob("*.[ch]"))]
    parts = [
        *(path.read_text(encoding="utf-8") for path in paths),
        *defines.values(),
        *FLAGS,
        *TARGETS[target],
    ]
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
    stem = "-".join([source.stem, *filter(None, [defines.get("RULE")]), target, platform.machine()])
    return f"{stem}-{digest}.so"


def _target() -> str:
    """Return the entry of `TARGETS` for this processor."""
    import torch

    capability = torch.backends.cpu.get_cpu_capability().lower()
    return capability if capability in TARGETS else "default"


def _cache_folder() -> Path:
    """Return a cache folder that only this user can write to, since code in it is executed."""
    return next(filter(_is_made, _folders()), None) or Path(tempfile.mkdtemp(prefix="gradpolicy-"))


def _folders() -> Iterator[Path]:
    """Return the user's cache folder, and a temporary one for users without a writable home."""
    caches = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(caches):  # a container's user may have no home
        yield Path(caches, "gradpolicy")
    if hasattr(os, "getuid"):
        yield Path(tempfile.gettempdir()) / f"gradpolicy-{os.getuid()}"


def _is_made(folder: Path) -> bool:
    """Create a folder if necessary; return True if this user, and no other, can write to it."""
    try:
        if not folder.is_dir():
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError:
        return False
    own = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    return own and not status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and os.access(folder, os.W_OK)
