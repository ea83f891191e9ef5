"""Writes files completely or not at all, even if the process or machine dies."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any


@contextmanager
def atomic_open(path: Path, mode: str = "w", **options: Any) -> Iterator[IO[Any]]:
    """Open a file for writing that replaces the file at `path` when the block ends without an error.

    Until then the old content stays. The new content is synced to the disk before the file is renamed.

    Args:
        path: The file; its directory must exist.
        mode: ``"w"`` or ``"wb"``, with a plus to allow reading.
        **options: As for ``open``.
    """
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        with part.open(mode, **options) as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def write_text(path: Path, text: str) -> None:
    """Write a text file that is complete or absent."""
    with atomic_open(path, encoding="utf-8") as file:
        file.write(text)


def is_inside(path: Path, directory: Path) -> bool:
    """Return True if a path, with all links in it followed, is in a directory."""
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(directory))


def sync_folder(folder: Path) -> None:
    """Sync a directory to the disk, so that renamed files survive a power failure."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
