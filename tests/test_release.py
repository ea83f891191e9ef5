"""What an index shows of the package is true, and one version is named everywhere."""

import re
import tomllib
from pathlib import Path

import yaml
from packaging.requirements import Requirement

import gradpolicy as gp

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
REQUIREMENTS = [Requirement(line) for lines in (PROJECT["dependencies"], *EXTRAS.values()) for line in lines]


def test_the_changelog_begins_with_this_version() -> None:
    first = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)
    assert first[1] == gp.__version__


def test_the_citation_is_valid_and_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()
    assert citation["cff-version"] == "1.2.0"
    assert all(set(author) == {"name"} for author in citation["authors"])
    assert citation["version"] == gp.__version__
    assert citation["license"] == PROJECT["license"]


def test_the_table_of_versions_is_that_of_the_requirements_and_pins() -> None:
    _, _, versions = (ROOT / "docs" / "install.md").read_text().partition("\n## Versions\n")
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \|$", versions, flags=re.MULTILINE)
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    assert len(rows) >= 8
    for name, allowed, tested in rows:
        (required,) = {each.specifier for each in REQUIREMENTS if each.name == name and each.specifier}
        assert set(allowed.split(",")) == set(str(required).split(",")), name
        assert pins[name] == tested, name
        assert required.contains(tested)
