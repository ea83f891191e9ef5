"""The YAML of a card: each block names its file and can be planned on a model."""

import hashlib
import shutil
from pathlib import Path

import pytest
import yaml

from gradpolicy.app.config import Source
from gradpolicy.tasks import data_sets
from tests.docs.markdown import DOCS, ROOT, all_blocks, write_modules
from tests.docs.plans import planned

CARDS = [
    card
    for folder in ("policies", "masks")
    for card in sorted((DOCS / folder).glob("*.md"))
    if card.stem != "README"
]
BLOCKS = [
    pytest.param(block.text, id=f"{card.stem}:{number}")
    for card in CARDS
    for number, block in enumerate(block for block in all_blocks(card) if block.language == "yaml")
]
CLASSIFIER = """\
_target_: gradpolicy.tasks.Classifier
optimizer: ${oc.select:optimizer,null}
model:
"""
MODELS = {
    "coded": "  _target_: tests.docs.models.Coded\n",
    "masked": "  _target_: tests.docs.models.Masked\n",
    "experts": "  _target_: tests.docs.models.Experts\n"
    "  router: {_target_: tests.docs.models.Noisy, in_features: 64, out_features: 4}\n",
}
CHARACTERS = "model=character_transformer data=tiny_shakespeare data.download=true policy={}"
# The default model rounds: most policies are planned beside the one that passes the gradient there.
DEFAULT = "policy=[straight_through,{}]"
COMMANDS = {
    **dict.fromkeys(["quantiser", "across", "sine", "smooth"], "policy={}"),
    "rounding": "extensions=[my_rules] policy={}",
    "new_tokens": CHARACTERS,
    "residual": CHARACTERS,
    "frozen_norms": CHARACTERS,
    "bits": "model=visual_attention model.model.size=8 policy={}",
    "choices": "model=experts policy={}",
    "rotated_codes": "model=coded policy={}",
    "nan_safe": "model=masked policy={}",
}


def name_of(text: str) -> str:
    """Return the name of a block's first policy."""
    return next(iter(yaml.safe_load(text)))


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The configs, with the blocks of the cards saved under the names that they give."""
    folder = tmp_path_factory.mktemp("configs")
    shutil.copytree(ROOT / "conf", folder / "conf")
    for name, model in MODELS.items():
        (folder / "conf" / "model" / f"{name}.yaml").write_text(CLASSIFIER + model)
    for (text,) in (case.values for case in BLOCKS):
        path = folder / "conf" / "policy" / f"{name_of(text)}.yaml"
        assert not path.exists(), f"{path.name} is there already; give the block another name"
        path.write_text(text)
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
    monkeypatch.setattr(data_sets, "SHAKESPEARE_FILES", {"input.txt": sha256})
    return tmp_path


@pytest.mark.parametrize("text", BLOCKS)
def test_a_block_begins_with_the_name_of_its_file(text: str) -> None:
    assert text.startswith(f"# conf/policy/{name_of(text)}.yaml\n")


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize("text", BLOCKS)
def test_a_block_is_planned_on_its_model(configs: Source, shakespeare: Path, text: str) -> None:
    name = name_of(text)
    words = COMMANDS.get(name, DEFAULT).format(name).split()
    if "data=tiny_shakespeare" in words:
        words.append(f"data.data_dir={shakespeare}")
    plan = planned(configs, words)
    assert name in str(plan)
    # A policy that freezes a part for a while says that dropout goes on there.
    assert [line for line in plan.warnings if "not dropout" not in line] == []
