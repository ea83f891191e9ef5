"""JSON files are read by a model; what does not fit is named by its place."""

from dataclasses import dataclass

import pytest

from gradpolicy.train.json_file import parse_json


@dataclass
class Point:
    x: float
    names: list[str]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "Invalid JSON: EOF"),
        (b"\xff", "Invalid JSON"),
        (100_000 * b"[", "Invalid JSON: recursion limit"),
        (b"[]", "Input should be an object"),
        (b"{}", "x: Field required"),
        (b'{"x": "1", "names": []}', "x: Input should be a valid number"),
        (b'{"x": 1, "names": ["a", 3]}', r"names\.1: Input should be a valid string"),
        (b'{"x": 1, "names": "abc"}', "names: Input should be a valid array"),
    ],
)
def test_what_does_not_fit_is_named_by_its_place(content: bytes, message: str) -> None:
    assert parse_json(b'{"names": [], "x": 1, "other": {}}', Point) == Point(1.0, [])
    with pytest.raises(ValueError, match=f"^{message}"):
        parse_json(content, Point)
