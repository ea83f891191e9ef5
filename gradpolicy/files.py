"""Writes files completely or not at all, and reads JSON.

A file that is written is complete even if the process or machine dies. Pydantic validates what is read.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar, cast

from gradpolicy.errors import brief

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Model = TypeVar("Model")


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


# ---- JSON


def write_json(path: Path, content: Any) -> None:
    """Write plain values as an indented JSON file that is complete or absent."""
    write_text(path, json.dumps(content, indent=2) + "\n")


def read_json(path: Path, model: type[Model]) -> Model:
    """Read a JSON file.

    Args:
        path: The file.
        model: A pydantic model or a dataclass. Keys without a field are ignored.

    Raises:
        OSError: If the file cannot be read.
        ValueError: If the content is invalid; the message has the first error and its position.
    """
    if path.exists() and not path.is_file():
        # To read a pipe would take until somebody writes to it.
        raise ValueError("it is no regular file")
    return parse_json(path.read_bytes(), model)


def parse_json(content: bytes, model: type[Model]) -> Model:
    """Parse JSON; see :func:`read_json`. Types are strict: a string is not converted to a number.

    Example:
        >>> parse_json(b'{"a": 1}', dict[str, int])
        {'a': 1}
    """
    from pydantic import ValidationError

    try:
        return cast(Model, _adapter(cast(Any, model)).validate_json(content, strict=True))
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(map(str, problem["loc"]))
        raise ValueError(brief(f"{place}: {problem['msg']}".removeprefix(": "), most=120)) from error


@cache
def _adapter(model: Any) -> "TypeAdapter[Any]":
    from pydantic import TypeAdapter

    return TypeAdapter(model)
