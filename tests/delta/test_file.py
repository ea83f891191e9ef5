"""A file may come from a stranger: what is damaged, foreign or made up is refused in one line."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import gradpolicy as gp
from gradpolicy.delta.file import _checksum
from gradpolicy.errors import PolicyError

Metadata = dict[str, str]
Content = dict[str, Tensor]


def whole_base() -> Content:
    return {"a": torch.zeros(40, 10), "b": torch.zeros(4), "c": torch.zeros(30, 3), "d": torch.zeros(30, 3)}


@pytest.fixture(scope="module")
def whole_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    after = whole_base()
    after["a"].view(-1)[[3, 333]] = 1.0
    after["b"] += 1.0
    after["c"][[1, 29]] = 1.0
    after["d"] = after["c"]
    path = tmp_path_factory.mktemp("whole") / "whole.safetensors"
    gp.delta.save(path, after, whole_base())
    return path


def metadata_of(path: Path) -> Metadata:
    raw = path.read_bytes()
    return json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])["__metadata__"]


def refused(path: Path) -> str:
    """The one line with which every function refuses a file."""
    lines = set()
    for function in (gp.delta.info, lambda path: gp.delta.apply({"a": torch.zeros(40, 10)}, path)):
        with pytest.raises(PolicyError) as caught:
            function(path)
        lines.add(str(caught.value))
    (line,) = lines
    assert "\n" not in line
    assert str(path) in line
    assert len(line) < len(str(path)) + 200
    return line


def save_with_checksum(content: Content, metadata: Metadata, path: Path) -> None:
    del metadata["checksum"]
    save_file(content, path, {**metadata, "checksum": _checksum(content, metadata)})


def test_every_changed_bit_and_missing_or_added_byte_is_found(whole_file: Path, tmp_path: Path) -> None:
    raw, path = whole_file.read_bytes(), tmp_path / "damaged"
    for place in range(0, len(raw), 7):
        path.write_bytes(raw[:place] + bytes([raw[place] ^ 4]) + raw[place + 1 :])
        assert "delta: " in refused(path)
    for content in (*(raw[:size] for size in range(0, len(raw), 50)), raw[:-1], raw + b"\0"):
        path.write_bytes(content)
        assert "is damaged" in refused(path)


def test_other_files_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "foreign"
    assert "cannot be read" in refused(path)
    assert "cannot be read" in refused(tmp_path)
    torch.save({"a": torch.zeros(3)}, path)
    assert "is damaged" in refused(path)
    save_file({"a": torch.zeros(3)}, path)
    assert "is no file of gradpolicy.delta" in refused(path)
    save_file({"a": torch.zeros(3)}, path, {"format": "gradpolicy.delta 1"})
    assert "it is 'gradpolicy.delta 1', and 'gradpolicy.delta 2' is read" in refused(path)


def altered(key: str, change: Callable[[dict[str, Any]], None]) -> Callable[[Content, Metadata], None]:
    """Alters a part of the metadata."""

    def alter(_: Content, metadata: Metadata) -> None:
        table = json.loads(metadata[key])
        change(table)
        metadata[key] = json.dumps(table)

    return alter


def replaced(name: str, tensor: Tensor) -> Callable[[Content, Metadata], None]:
    return lambda content, _: content.update({name: tensor})


DEEP = "[" * 100_000
MADE_UP: dict[str, tuple[Callable[[Content, Metadata], None], str]] = {
    "index_beyond": (replaced("gaps:a", torch.ByteTensor([3, 255, 254])), "index 513 is out of"),
    "row_beyond": (replaced("gaps:c", torch.ByteTensor([1, 28])), "index 30 is out of range, there are 30"),
    "gap_without_end": (replaced("gaps:a", torch.ByteTensor([3, 255])), "has no end"),
    "too_few_values": (replaced("values:a", torch.zeros(2, 1, 1)), "shape"),
    "other_dtype": (replaced("values:b", torch.zeros(2, 1, 4).half()), "its values are torch.float16"),
    "whole_of_the_base": (replaced("whole:a", torch.zeros(40, 10)), "'whole:a', which belongs to no tensor"),
    "gaps_alone": (lambda content, _: content.pop("values:a"), "'gaps:a', which belongs to no tensor"),
    "no_base": (lambda _, metadata: metadata.pop("base"), "'base' cannot be read"),
    "deep_json": (lambda _, metadata: metadata.update(base=DEEP), "'base' cannot be read"),
    "huge_size": (altered("base", lambda base: base["b"][2].append(2**63)), "describes the base's 'b'"),
    "strange_dtype": (altered("base", lambda base: base["b"].__setitem__(1, "object")), "describes"),
    "same_as_itself": (altered("same", lambda same: same.update(a="a")), "cannot be the same as 'a'"),
    "same_of_another_shape": (altered("same", lambda same: same.update(d="b")), "cannot be the same as 'b'"),
}


@pytest.mark.parametrize("kind", MADE_UP)
def test_what_is_made_up_is_refused_though_its_checksum_is_right(kind, whole_file, tmp_path):
    make_up, message = MADE_UP[kind]
    content, metadata = load_file(whole_file), metadata_of(whole_file)
    assert json.loads(metadata["same"]) == {"d": "c"}
    make_up(content, metadata)
    save_with_checksum(content, metadata, tmp_path / "made_up")
    assert message in refused(tmp_path / "made_up")


def test_wrong_values_of_the_base_are_found_before_anything_is_written(whole_file, tmp_path):
    content, metadata = load_file(whole_file), metadata_of(whole_file)
    content["values:b"][0] = 7.0
    save_with_checksum(content, metadata, tmp_path / "made_up")
    model = whole_base()
    with pytest.raises(PolicyError, match="b differs"):
        gp.delta.apply(model, tmp_path / "made_up")
    assert not any(tensor.any() for tensor in model.values())


def test_equal_content_gives_equal_bytes_again_and_again(whole_file: Path, tmp_path: Path) -> None:
    for _ in range(20):  # safetensors alone orders four entries of metadata in 24 ways
        gp.delta.merge([whole_file], [1.0], tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == whole_file.read_bytes()
