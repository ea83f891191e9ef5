"""The documentation site: the API reference has every public name, and Sphinx builds it without a warning."""

import re
from functools import cache
from pathlib import Path
from urllib.parse import unquote

import pytest

import gradpolicy as gp
from tests.docs.markdown import DOCS

REFERENCE = "\n".join(page.read_text() for page in sorted((DOCS / "api").glob("*.md")))
DOCUMENTED = set(re.findall(r"^\.\. auto\w+:: (\S+)$", REFERENCE, flags=re.MULTILINE))
# Taken now: tests and examples register more.
FAMILIES = {
    module
    for name in gp.rule_names()
    if (module := gp.get_rule(name).function.__module__).startswith("gradpolicy.")
}
MODULES = {
    "curvature": "gradpolicy.insight.curvature",
    "delta": "gradpolicy.delta",
    "masks": None,
    "schedules": "gradpolicy.schedules",
}


def test_every_public_name_is_in_the_reference() -> None:
    missing = {f"gradpolicy.{name}" for name in set(gp.__all__) - set(MODULES)} - DOCUMENTED
    assert not missing, f"docs/api: add a line `.. autoclass:: …` for each of {missing}"


def test_every_family_of_rules_is_in_the_reference() -> None:
    assert not FAMILIES - DOCUMENTED, "docs/api/README.md: add a line `.. automodule:: …` for each"
    assert {module for module in MODULES.values() if module} <= DOCUMENTED


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site_builds_without_a_warning_and_loads_nothing_from_elsewhere(site: Path) -> None:
    assert 'id="gradpolicy.Freeze"' in (site / "api" / "README.html").read_text()
    assert (site / "searchindex.js").exists()
    remote = re.compile(
        r"""<(?:script|link|img)\b[^>]*(?:src|href)="https?://|\bimport\b[^;<]*["']https?://"""
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page.name for page in pages if remote.search(page.read_text())] == []


@cache
def anchors(page: Path) -> set[str]:
    return set(re.findall(r'\bid="([^"]+)"', page.read_text()))


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_every_link_within_the_site_leads_somewhere(site: Path) -> None:
    missing, followed = [], 0
    # The pages with the code link back by a name that Sphinx guesses.
    pages = [page for page in site.rglob("*.html") if page.relative_to(site).parts[0] != "_modules"]
    for page in pages:
        for link in re.findall(r'(?:href|src)="([^"]+)"', page.read_text()):
            if re.match(r"\w+:", link):
                continue
            followed += 1
            path, _, anchor = unquote(link).partition("#")
            target = page.parent / path.partition("?")[0] if path else page
            is_there = target.exists() and (
                not anchor or target.suffix != ".html" or anchor in anchors(target)
            )
            if not is_there:
                missing.append(f"{page.relative_to(site)}: {link}")
    assert missing == []
    assert followed > 10_000
