"""The YAML of a card is a file of docs/snippets, and the command below it plans it on the model it names."""

import re
import shlex
import shutil
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

ROOT = Path(__file__).parents[2]
SNIPPETS = ROOT / "docs" / "snippets" / "policy"
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
# What no model of the repository has: a router, drawn actions, numbered blocks with two additions; and an
# argument of a model. Their policies are built in test_cards.py.
WITHOUT_MODEL = {"choices", "actions", "residual", "rule"}


def snippets() -> list:
    found = []
    for card in CARDS:
        for block in BLOCK.finditer(card.read_text()):
            name = next(iter(yaml.safe_load(block["text"])))
            found.append(pytest.param(name, block["text"], block["command"], id=f"{card.stem}:{name}"))
    return found


@pytest.fixture(scope="module")
def configs(tmp_path_factory: pytest.TempPathFactory) -> Source:
    """The configs with the snippets beside them, as ``--config-dir docs/snippets`` has them."""
    folder = tmp_path_factory.mktemp("configs") / "conf"
    shutil.copytree(ROOT / "conf", folder)
    for snippet in SNIPPETS.glob("*.yaml"):
        # Where a name is in both, the project's would count.
        assert not (folder / "policy" / snippet.name).exists()
        shutil.copy(snippet, folder / "policy")
    return Source(folder)


@pytest.fixture
def own_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The functions of a person's own that two cards show."""
    for card, module in (("policies/use_rule.md", "my_rules"), ("masks/function.md", "my_masks")):
        text = (ROOT / "docs" / card).read_text()
        code = re.search(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
        assert code
        (tmp_path / f"{module}.py").write_text(code[1])
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(("name", "text", "command"), snippets())
def test_a_snippet_is_a_file_with_a_command(name: str, text: str, command: str | None) -> None:
    assert (command is None) == (name in WITHOUT_MODEL)
    if command:
        assert (SNIPPETS / f"{name}.yaml").read_text() == text
        assert name in command
        assert "plan_only=true" in command


@pytest.mark.slow
@pytest.mark.usefixtures("own_modules")
@pytest.mark.parametrize(
    ("name", "text", "command"), [case for case in snippets() if case.values[0] not in WITHOUT_MODEL]
)
def test_a_snippet_is_planned_on_its_model(configs: Source, name: str, text: str, command: str) -> None:
    words = shlex.split(command)
    with limited_to(trusted_packages(words, ROOT)), hydra_at(configs):
        job = compose_job(configs, fixed_overrides(words))
        check_job(job, words)
        with read_write(job), open_dict(job):
            del job["hydra"]
        plan = make_run_plan(build_subject(resolved(job)), seed=0)
    assert name in str(plan)
    assert plan.warnings == ()


def test_no_file_is_left_over() -> None:
    assert {path.stem for path in SNIPPETS.glob("*.yaml")} == {
        case.values[0] for case in snippets() if case.values[0] not in WITHOUT_MODEL
    }
