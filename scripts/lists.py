"""Writes the lists in the documentation that are generated from tables of the package."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

from gradpolicy.masks import SOURCES
from gradpolicy.optim.update_rules import RULES

ROOT = Path(__file__).parents[1]


def update_rules() -> str:
    """Return the optimizers with an update rule."""
    return ", ".join(f"`{name}`" for name in RULES)


def mask_sources() -> str:
    """Return the entries of the mask sources in the API reference."""
    classes = "\n\n".join(f".. autoclass:: gradpolicy.masks.{name}" for name in SOURCES)
    return f"```{{eval-rst}}\n{classes}\n```"


LISTS: dict[str, tuple[str, Callable[[], str]]] = {
    "update rules": ("docs/python.md", update_rules),
    "mask sources": ("docs/api/masks.md", mask_sources),
}
"""For the comment before each list: the page, and the function that returns the list."""


def page_with(name: str) -> tuple[Path, str]:
    """Return the page of a list, and its text with the current list."""
    place, make = LISTS[name]
    text = (ROOT / place).read_text(encoding="utf-8")
    changed, count = re.subn(
        f"(<!-- {name} -->\n).*?(\n<!-- end -->)",
        lambda found: f"{found[1]}{make()}{found[2]}",
        text,
        flags=re.S,
    )
    assert count == 1, f"{place} has no list of {name}"
    return ROOT / place, changed


def main() -> None:
    for name in LISTS:
        path, text = page_with(name)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
