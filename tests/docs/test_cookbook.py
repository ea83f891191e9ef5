"""The cookbook: every Python block runs by itself, and the YAML says the same as the Python before it."""

import re
from pathlib import Path

import pytest
import torch
import yaml
from hydra.utils import instantiate

import gradpolicy as gp
from tests.docs.markdown import DOCS, MODULE, ROOT, all_blocks, blocks, pictures, write_modules

FOLDER = DOCS / "cookbook"
PAGES = sorted(FOLDER.glob("*.md"))
PYTHON = [
    pytest.param(
        block.text,
        id=f"{page.stem}:{block.line}",
        # Whole trainings; one of them is quick enough.
        marks=[pytest.mark.slow] if page.stem not in ("README", "binary") else [],
    )
    for page in PAGES
    for block in all_blocks(page)
    if block.language == "python"
]
# Policies in YAML, with the Python block before them.
YAML = [
    pytest.param(before.text, block.text, id=f"{page.stem}:{block.line}")
    for page in PAGES
    for before, block in zip(all_blocks(page), all_blocks(page)[1:], strict=False)
    if block.language == "yaml" and before.language == "python"
]


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_modules(PAGES, tmp_path, monkeypatch)


def run(block: str) -> dict:
    module = MODULE.match(block)
    names = {"__name__": module[1] if module else "page"}
    torch.manual_seed(0)
    exec(compile(block, "page", "exec"), names)
    return names


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("block", PYTHON)
def test_a_python_block_runs_by_itself(block: str) -> None:
    assert len(run(block)) > 2


@pytest.mark.mostly_slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(("python", "block"), YAML)
def test_the_yaml_is_the_policy_of_the_python_before_it(python: str, block: str) -> None:
    names = run(python)
    policies = {name: instantiate(node) for name, node in yaml.safe_load(block).items()}
    assert {name: repr(policy) for name, policy in policies.items()} == {
        name: repr(policy) for name, policy in names["policies"].items()
    }
    flow = {name: policy for name, policy in policies.items() if not isinstance(policy, gp.Freeze)}
    if flow and "model" in names:
        installed = gp.install(names["model"], flow)
        assert all(name in str(installed.report()) for name in flow)
        installed.set_active(next(iter(flow)), False)
        installed.remove()


def test_the_experiment_shows_its_policy_its_command_and_a_picture() -> None:
    page = FOLDER / "visual_attention.md"
    (block,) = blocks(page, "yaml")
    assert yaml.safe_load(block) == yaml.safe_load((ROOT / "conf/policy/visual_attention.yaml").read_text())
    assert "python train.py experiment=visual_attention" in page.read_text()
    assert pictures(page)
    assert all(picture.stat().st_size < 64 * 1024 for picture in pictures(page))


def test_every_page_is_in_the_table_and_prints_a_result() -> None:
    text = (FOLDER / "README.md").read_text()
    pages = [page for page in PAGES if page.stem != "README"]
    assert all(f"({page.name})" in text for page in pages)
    for page in pages:
        programs = blocks(page, "python")
        assert len(programs) == (page.stem != "visual_attention")
        assert all("print(" in program and "assert " in program for program in programs)


def test_every_question_has_its_section_and_every_section_its_yaml() -> None:
    text = (FOLDER / "README.md").read_text()
    questions = re.findall(r"^\| \[([^]]+)\]\(#([^)]+)\)", text, flags=re.MULTILINE)
    titles = re.findall(r"^## (.+)$", text, flags=re.MULTILINE)
    anchors = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
    assert [anchor for _, anchor in questions] == anchors
    assert len(anchors) == 13
    for section in re.split(r"^## ", text, flags=re.MULTILINE)[1:]:
        assert "```python" in section
        assert "```yaml" in section or "gp.curvature" in section
