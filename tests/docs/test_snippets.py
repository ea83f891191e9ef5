"""The YAML of a card is a file of docs/snippets, and the command below it plans it on the model it names."""

import hashlib
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from omegaconf import open_dict, read_write

from gradpolicy.imports import limited_to
from gradpolicy.launch.allowed_targets import trusted_packages
from gradpolicy.launch.build import build_subject
from gradpolicy.launch.compose import Source, check_job, compose_job, fixed_overrides, hydra_at
from gradpolicy.launch.config import resolved
from gradpolicy.launch.run import make_run_plan
from gradpolicy.tasks import tiny_shakespeare
from gradpolicy.tasks.files import RemoteFile

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets"
CARDS = [
    card
    for folder in ("policies", "masks")
    for card in sorted((ROOT / "docs" / folder).glob("*.md"))
    if card.stem != "README"
]
BLOCK = re.compile(
    r"^```yaml\n(?P<text>.*?)^```\n"
    r"(\nPlan it: `python train\.py --config-dir docs/snippets (?P<command>[^`]+)`\n)?",
    flags=re.DOTALL | re.MULTILINE,
)
MODULE = re.compile(r"^```python\n(# (\w+)\.py\n.*?)^```", flags=re.DOTALL | re.MULTILINE)


def snippets() -> list:
    return [
        pytest.param(block["text"], block["command"], id=f"{card.stem}:{number}")
        for card in CARDS
        for number, block in enumerate(BLOCK.finditer(card.read_text()))
    ]


def file_of(text: str, command: str) -> Path:
    """Where a snippet belongs: a policy is called as its key, a model as the command calls it."""
    key = next(iter(yaml.safe_load(text)))
    if key == "_target_":
        (model,) = re.findall(r" model=(\w+) ", command)
        return Path("model", f"{model}.yaml")
    assert re.search(rf"policy=\[?(\w+,)*{key}\b", command)
    return Path("policy", f"{key}.yaml")


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The configs with the snippets beside them, as ``--config-dir docs/snippets`` has them."""
    folder = tmp_path_factory.mktemp("configs") / "conf"
    shutil.copytree(ROOT / "conf", folder)
    for snippet in SNIPPETS.glob("*/*.yaml"):
        copy = folder / snippet.relative_to(SNIPPETS)
        # Where a name is in both, the project's would count.
        assert not copy.exists()
        shutil.copy(snippet, copy)
    return Source(folder)


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The modules of a person's own that cards show."""
    for card in CARDS:
        for code, module in MODULE.findall(card.read_text()):
            (tmp_path / f"{module}.py").write_text(code)
            # Pages show other modules of the same name.
            monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.fixture
def shakespeare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a text of 65 characters stands for the one that a command downloads."""
    text = "".join(map(chr, range(40, 105))) * 80
    (tmp_path / "input.txt").write_text(text)
    file = RemoteFile("input.txt", "nowhere", hashlib.sha256(text.encode()).hexdigest())
    monkeypatch.setattr(tiny_shakespeare, "FILES", (file,))
    return tmp_path


@pytest.mark.parametrize(("text", "command"), snippets())
def test_a_snippet_is_a_file_with_a_command(text: str, command: str | None) -> None:
    assert command
    assert (SNIPPETS / file_of(text, command)).read_text() == text
    assert "plan_only=true" in command


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(("text", "command"), snippets())
def test_a_snippet_is_planned_on_its_model(
    configs: Source, shakespeare: Path, text: str, command: str
) -> None:
    words = shlex.split(command)
    if "data=tiny_shakespeare" in words:
        words.append(f"data.data_dir={shakespeare}")
    with limited_to(trusted_packages(words, ROOT)), hydra_at(configs):
        job = compose_job(configs, fixed_overrides(words))
        check_job(job, words)
        with read_write(job), open_dict(job):
            del job["hydra"]
        plan = make_run_plan(build_subject(resolved(job)), seed=0)
    file = file_of(text, command)
    assert file.parent.name == "model" or file.stem in str(plan)
    assert plan.warnings == ()


def test_no_file_is_left_over() -> None:
    files = {path.relative_to(SNIPPETS) for path in SNIPPETS.glob("*/*.yaml")}
    shown = {file_of(*case.values) for case in snippets()}
    # The model of two snippets of sampling.md, whose Python the card shows.
    assert files - shown == {Path("model/experts.yaml")}
    assert shown <= files
