"""The YAML of a card: each block names its file, and the command below it plans it on the model it names."""

import hashlib
import re
import shlex
import shutil
from pathlib import Path

import pytest
import yaml

from gradpolicy.launch.config import Source
from gradpolicy.tasks import tiny_shakespeare
from tests.docs.markdown import DOCS, ROOT, write_modules
from tests.docs.plans import planned

CARDS = [
    card
    for folder in ("policies", "masks")
    for card in sorted((DOCS / folder).glob("*.md"))
    if card.stem != "README"
]
BLOCK = re.compile(
    r"^```yaml\n(?P<text>(# (?P<path>conf/\S+\.yaml)\n)?.*?)^```\n"
    r"(\nPlan it: `python train\.py (?P<command>[^`]+)`\n)?",
    flags=re.DOTALL | re.MULTILINE,
)
BLOCKS = [
    pytest.param(card, block, id=f"{card.stem}:{number}")
    for card in CARDS
    for number, block in enumerate(BLOCK.finditer(card.read_text()))
]
PLANNED = [
    pytest.param(block["path"], block["command"], id=case.id)
    for case in BLOCKS
    for _, block in [case.values]
    if block["path"] and block["command"]
]


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The configs, with the blocks of the cards saved under the names that they give."""
    folder = tmp_path_factory.mktemp("configs")
    shutil.copytree(ROOT / "conf", folder / "conf")
    for case in BLOCKS:
        card, block = case.values
        path = folder / block["path"]
        assert not path.exists(), (
            f"{card.name}: {block['path']} is there already; give the block another name"
        )
        path.write_text(block["text"])
    return Source(folder / "conf")


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_modules(CARDS, tmp_path, monkeypatch)


@pytest.fixture
def shakespeare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a text of 65 characters stands for the one that a command downloads."""
    text = "".join(map(chr, range(40, 105))) * 80
    (tmp_path / "input.txt").write_text(text)
    sha256 = hashlib.sha256(text.encode()).hexdigest()
    monkeypatch.setattr(tiny_shakespeare, "FILES", {"input.txt": sha256})
    return tmp_path


@pytest.mark.parametrize(("card", "block"), BLOCKS)
def test_a_block_names_its_file_and_the_command_that_plans_it(card: Path, block: re.Match[str]) -> None:
    key = next(iter(yaml.safe_load(block["text"])))
    expected = rf"conf/policy/{key}\.yaml" if key != "_target_" else r"conf/model/\w+\.yaml"
    assert re.fullmatch(expected, block["path"] or ""), f"{card}: begin the block with `# {expected}`"
    group, name = Path(block["path"]).parts[1], Path(block["path"]).stem
    chooses = re.compile(rf"\b{group}=\[?(\w+,)*{name}\b")
    if group == "model" and not block["command"]:
        # Another block of the card is planned on this model.
        assert chooses.search(card.read_text())
        return
    assert block["command"], f"{card}: put ``Plan it: `python train.py … plan_only=true` `` below the block"
    assert chooses.search(block["command"])
    assert "plan_only=true" in block["command"]


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(("path", "command"), PLANNED)
def test_a_block_is_planned_on_its_model(configs: Source, shakespeare: Path, path: str, command: str) -> None:
    words = shlex.split(command)
    if "data=tiny_shakespeare" in words:
        words.append(f"data.data_dir={shakespeare}")
    plan = planned(configs, words)
    assert "conf/model/" in path or Path(path).stem in str(plan)
    # A policy that freezes a part for a while says that dropout goes on there.
    assert [line for line in plan.warnings if "not dropout" not in line] == []
