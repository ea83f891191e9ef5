"""The cards of the policies: their snippets run, their pictures exist, and none is missing."""

import re
from pathlib import Path

import pytest
import yaml
from hydra.utils import instantiate

import gradpolicy as gp
from gradpolicy import policies

FOLDER = Path(__file__).parents[2] / "docs" / "policies"
CARDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
NAMES = [path.stem for path in CARDS]
# Taken now: tests and examples register more.
BUILT_IN = [
    name for name in gp.rule_names() if gp.get_rule(name).function.__module__.startswith("gradpolicy.")
]


def snippets(card, language):
    return re.findall(rf"^```{language}\n(.*?)^```", card.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_the_python_runs_as_it_stands(card):
    blocks = snippets(card, "python")
    assert blocks
    exec(compile("\n".join(blocks), card.name, "exec"), {"__name__": "card"})


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_the_yaml_makes_policies(card):
    blocks = snippets(card, "yaml")
    assert blocks
    for block in blocks:
        content = yaml.safe_load(block)
        if "_target_" in content:
            continue  # a model with a rule as its argument
        for node in content.values():
            # The rule that its card registers; here any with the parameter will do.
            if node.get("rule") == "soft_round":
                node |= {"rule": "tanh", "parameters": {"slope": 2.0}}
            assert isinstance(instantiate(node), policies.Policy | gp.Rule)


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_a_card_has_every_part(card):
    text = card.read_text()
    for part in ("## YAML", "## Plain PyTorch", "## Trade-offs"):
        assert part in text
    assert "## Source" in text or "| source |" in text or card.stem == "use_rule"
    assert any(word in text for word in ("backward", "frozen entries", "grad_input"))


@pytest.mark.parametrize("card", CARDS, ids=NAMES)
def test_pictures_exist_and_are_small(card):
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", card.read_text())
    assert pictures
    assert all((FOLDER / picture).stat().st_size < 60 * 1024 for picture in pictures)


def test_every_policy_and_every_rule_has_its_place_on_a_card():
    overview = FOLDER / "README.md"
    text = " ".join(path.read_text() for path in (*CARDS, overview))
    classes = [name for name in gp.__all__ if isinstance(getattr(policies, name, None), type)]
    assert len(classes) >= 9
    for name in (name for name in classes if issubclass(getattr(policies, name), policies.Policy)):
        assert f"_target_: gradpolicy.{name}\n" in text, f"no YAML of {name} on a card of {FOLDER}"
    in_the_table = set(re.findall(r"`(\w+)`", overview.read_text()))
    missing = [f"`{name}`" for name in BUILT_IN if name not in in_the_table]
    assert not missing, f"{overview}: add {', '.join(missing)} to the row of its card, in the column 'rules'"
