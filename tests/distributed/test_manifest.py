"""The manifest shows every change of a directory of shards."""

import json
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest

from gradpolicy.checkpoint_file import UnreadableError
from gradpolicy.distributed import manifest

CONTENT = {"__0_0.distcp": b"weights" * 100, "__1_0.distcp": b"", "meta.pt": b"step"}


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    for name, content in CONTENT.items():
        (tmp_path / name).write_bytes(content)
    text = manifest.as_text(manifest.sums(tmp_path / name for name in CONTENT))
    (tmp_path / "whole").write_text(text)
    return tmp_path


def check(folder: Path) -> None:
    manifest.check(folder, folder / "whole")


def test_it_holds_the_size_and_the_checksum_of_each_file(whole: Path) -> None:
    check(whole)
    expected = {name: [len(content), zlib.crc32(content)] for name, content in CONTENT.items()}
    assert json.loads((whole / "whole").read_text()) == {"files": expected}


def test_there_is_one_way_to_write_it() -> None:
    sums = {"b": [1, 2], "a": [3, 4]}
    assert manifest.as_text(sums) == manifest.as_text(dict(sorted(sums.items())))


def change_a_bit(folder: Path) -> None:
    path = folder / "__0_0.distcp"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def add_a_byte(folder: Path) -> None:
    with (folder / "__1_0.distcp").open("ab") as file:
        file.write(b"\0")


def remove_a_file(folder: Path) -> None:
    (folder / "meta.pt").unlink()


def put_a_folder_in_place_of_a_file(folder: Path) -> None:
    remove_a_file(folder)
    (folder / "meta.pt").mkdir()


def rewrite(files: object) -> Callable[[Path], None]:
    def written(folder: Path) -> None:
        (folder / "whole").write_text(json.dumps({"files": files}, indent=1) + "\n")

    return written


def add_a_space(folder: Path) -> None:
    with (folder / "whole").open("a") as file:
        file.write(" ")


def cut_it_short(folder: Path) -> None:
    path = folder / "whole"
    path.write_bytes(path.read_bytes()[:-5])


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (change_a_bit, "__0_0.distcp differs from its checksum"),
        (add_a_byte, "__1_0.distcp differs from its checksum"),
        (remove_a_file, "it has no file 'meta.pt'"),
        (put_a_folder_in_place_of_a_file, "it has no file 'meta.pt'"),
        (rewrite({"../other": [0, 0]}), "it has no file '../other'"),
        (rewrite({"x" * 100: [0, 0]}), f"it has no file '{'x' * 80}'$"),
        (rewrite(None), "whole is no list of its files"),
        (rewrite([1]), "whole is no list of its files"),
        (cut_it_short, "whole is no list of its files"),
        (add_a_space, "whole was changed"),
    ],
)
def test_every_change_is_told(whole: Path, spoil: Callable[[Path], None], said: str) -> None:
    spoil(whole)
    with pytest.raises(UnreadableError, match=f"is damaged: {said}"):
        check(whole)


def test_a_file_elsewhere_is_not_read_though_it_fits(whole: Path) -> None:
    """Its size and checksum would tell whoever wrote the manifest what it holds."""
    outside = whole.parent / "outside"
    outside.write_bytes(b"secret")
    inside = whole / "sub"
    inside.mkdir()
    sums = manifest.sums([outside])
    (inside / "whole").write_text(manifest.as_text({"../../outside": sums["outside"]}))
    with pytest.raises(UnreadableError, match="it has no file"):
        manifest.check(inside, inside / "whole")
