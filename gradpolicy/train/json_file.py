"""Writes JSON files, and reads them with validation by pydantic."""

import json
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

from gradpolicy.atomic_file import write_text
from gradpolicy.errors import brief

if TYPE_CHECKING:
    from pydantic import TypeAdapter

Model = TypeVar("Model")


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
