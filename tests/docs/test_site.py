"""The documentation site: the API reference has every public name, and Sphinx builds it without a warning."""

import re
from pathlib import Path

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
    # Each large picture of the first page has its caption.
    assert (site / "index.html").read_text().count("</p>\n<p><em>") == 3
    remote = re.compile(
        r"""<(?:script|link|img)\b[^>]*(?:src|href)="https?://|\bimport\b[^;<]*["']https?://"""
    )
    pages = list(site.rglob("*.html"))
    assert len(pages) > 40
    assert [page.name for page in pages if remote.search(page.read_text())] == []
