"""The documentation site: the API reference has every public name, and Sphinx builds it without a warning."""

import re
from pathlib import Path

import pytest

import gradpolicy as gp

ROOT = Path(__file__).parents[2]
REFERENCE = "\n".join(page.read_text() for page in sorted((ROOT / "docs" / "api").glob("*.md")))
DOCUMENTED = set(re.findall(r"^\.\. auto\w+:: (\S+)$", REFERENCE, flags=re.MULTILINE))
MODULES = {
    "curvature": "gradpolicy.insight.curvature",
    "delta": "gradpolicy.delta",
    "masks": None,
    "schedules": "gradpolicy.schedules",
}


@pytest.mark.parametrize("name", sorted(set(gp.__all__) - set(MODULES)))
def test_every_public_name_is_in_the_reference(name: str) -> None:
    assert f"gradpolicy.{name}" in DOCUMENTED


def test_every_mask_source_and_every_family_of_rules_is_in_the_reference() -> None:
    schedules = set(gp.schedules.__all__)
    assert {f"gradpolicy.masks.{name}" for name in set(gp.masks.__all__) - schedules} <= DOCUMENTED
    families = {gp.get_rule(name).function.__module__ for name in gp.rule_names()}
    assert {family for family in families if family.startswith("gradpolicy.")} <= DOCUMENTED
    assert {module for module in MODULES.values() if module} <= DOCUMENTED


@pytest.mark.slow
@pytest.mark.xdist_group("site")
def test_the_site_builds_without_a_warning(site: Path) -> None:
    page = (site / "api" / "policies.html").read_text()
    assert 'id="gradpolicy.Freeze"' in page
    assert (site / "searchindex.js").exists()
