"""The manifest of a directory of shards: each file with its size and checksum, as JSON.

It shows damage, not who wrote the directory: whoever can write shards can write their checksums.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from gradpolicy.checkpoint_file import UnreadableError, checksum

Sums = dict[str, list[int]]


def sums(paths: Iterable[Path]) -> Sums:
    """Size and CRC-32 of files, by name."""
    return {path.name: _sum(path) for path in paths}


def as_text(files: Mapping[str, list[int]]) -> str:
    """The manifest of files. There is only one way to write it, so that any changed bit is noticed."""
    return json.dumps({"files": {name: files[name] for name in sorted(files)}}, indent=1) + "\n"


def check(folder: Path, manifest: Path) -> None:
    """Compares the files of a folder with its manifest.

    Raises:
        UnreadableError: If a file is absent or differs, or the manifest is damaged.
    """
    written = manifest.read_bytes()
    try:
        expected: Sums = dict(json.loads(written)["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise UnreadableError(f"is damaged: {manifest.name} is no list of its files") from error
    for name, told in expected.items():
        if Path(name).name != name or not (folder / name).is_file():
            raise UnreadableError(f"is damaged: it has no file {name[:80]!r}")
        if _sum(folder / name) != told:
            raise UnreadableError(f"is damaged: {name} differs from its checksum")
    if as_text(expected).encode() != written:
        raise UnreadableError(f"is damaged: {manifest.name} was changed")


def _sum(path: Path) -> list[int]:
    size = path.stat().st_size
    with path.open("rb") as file:
        return [size, checksum(file, size)]
