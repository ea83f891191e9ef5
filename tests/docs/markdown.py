"""Blocks of code in Markdown pages, and the modules that pages let a person write."""

import importlib
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULE = re.compile(r"# (\w+)\.py\n")


class Block(NamedTuple):
    """A block of code, and the line of the page on which it begins."""

    language: str
    text: str
    line: int


def all_blocks(page: Path) -> list[Block]:
    """Return the blocks of a page in order."""
    text = page.read_text()
    return [
        Block(found[1], found[2], text[: found.start()].count("\n") + 1)
        for found in re.finditer(r"^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    ]


def blocks(page: Path, language: str) -> list[str]:
    """Return the texts of a page's blocks in one language."""
    return [block.text for block in all_blocks(page) if block.language == language]


def pictures(page: Path) -> list[Path]:
    """Return the pictures that a page shows."""
    return [page.parent / name for name in re.findall(r"!\[[^\]]+\]\(([^)]+)\)", page.read_text())]


def write_modules(pages: Iterable[Path], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Write the modules that pages show, the blocks that begin with ``# name.py``, and import them anew."""
    monkeypatch.syspath_prepend(folder)
    for text in (text for page in pages for text in blocks(page, "python")):
        if found := MODULE.match(text):
            (folder / f"{found[1]}.py").write_text(text)
            # Pages show other modules of the same name.
            monkeypatch.delitem(sys.modules, found[1], raising=False)
            importlib.import_module(found[1])
