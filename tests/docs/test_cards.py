"""The cards of policies and mask sources: snippets run, pictures exist, no card and no config is missing."""

import re
from pathlib import Path

import pytest
import yaml
from hydra.utils import instantiate

import gradpolicy as gp
from gradpolicy import policies
from gradpolicy.masks import SOURCES
from gradpolicy.masks.scores import SCORES
from tests.docs.markdown import DOCS, MODULE, ROOT, all_blocks, blocks, pictures

CARDS = {
    folder: sorted(path for path in (DOCS / folder).glob("*.md") if path.name != "README.md")
    for folder in ("policies", "masks")
}
PARTS = {
    "policies": ("## YAML", "## Plain PyTorch", "## Trade-offs"),
    "masks": (
        *("| active entries | frozen entries |", "## YAML", "## Plain PyTorch", "## Parameters"),
        *("## Suggested settings", "## Trade-offs", "## Source"),
    ),
}
# Taken now: tests and examples register more.
BUILT_IN = [
    name for name in gp.rule_names() if gp.get_rule(name).function.__module__.startswith("gradpolicy.")
]
each_card = pytest.mark.parametrize(
    "card", [*CARDS["policies"], *CARDS["masks"]], ids=lambda card: f"{card.parent.name}/{card.stem}"
)


@pytest.mark.filterwarnings("error::UserWarning")
@each_card
def test_the_python_runs_as_it_stands_and_the_yaml_makes_policies(card: Path) -> None:
    code, texts = blocks(card, "python"), blocks(card, "yaml")
    assert code
    assert texts
    # The rules that it registers are named in the YAML; they belong to the module that the card shows.
    name = next((found[1] for found in map(MODULE.match, code) if found), "card")
    exec(compile("\n".join(code), card.name, "exec"), {"__name__": name})
    for content in map(yaml.safe_load, texts):
        for node in content.values():
            if card.stem == "function":
                node["mask"]["function"]["_target_"] = "torch.where"
            made = instantiate(node)
            kind = gp.Freeze if card.parent.name == "masks" else policies.Policy | gp.Rule
            made = list(made.values()) if isinstance(made, dict) else [made]
            assert made
            assert all(isinstance(each, kind) for each in made)


@each_card
def test_a_card_begins_with_python(card: Path) -> None:
    assert all_blocks(card)[0].language == "python"


@each_card
def test_a_card_has_every_part_and_small_pictures(card: Path) -> None:
    text, folder = card.read_text(), card.parent.name
    assert [part for part in PARTS[folder] if part not in text] == []
    assert all(picture.stat().st_size < 60 * 1024 for picture in pictures(card))
    if folder == "policies":
        assert pictures(card)
        assert "## Source" in text or "| source |" in text or card.stem == "use_rule"
        assert any(word in text for word in ("backward", "frozen entries", "grad_input"))


def test_every_policy_and_every_rule_has_its_place_on_a_card() -> None:
    overview = DOCS / "policies" / "README.md"
    text = " ".join(path.read_text() for path in (*CARDS["policies"], overview))
    classes = [name for name in gp.__all__ if isinstance(getattr(policies, name, None), type)]
    assert len(classes) >= 9
    for name in (name for name in classes if issubclass(getattr(policies, name), policies.Policy)):
        assert f"_target_: gradpolicy.{name}\n" in text, f"no YAML of {name} on a card of docs/policies"
    in_the_table = set(re.findall(r"`(\w+)`", overview.read_text()))
    missing = [f"`{name}`" for name in BUILT_IN if name not in in_the_table]
    assert not missing, f"{overview}: add {', '.join(missing)} to the row of its card, in the column 'rules'"


def file_name(source: str) -> str:
    """``TopK`` → ``topk``, ``PruneAndGrow`` → ``prune_and_grow``."""
    return {"TopK": "topk"}.get(source) or re.sub(r"(?<!^)(?=[A-Z])", "_", source).lower()


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_has_a_card_and_a_line_in_the_overview(source: str) -> None:
    card, overview = DOCS / "masks" / f"{file_name(source)}.md", DOCS / "masks" / "README.md"
    assert card.exists(), f"write {card}, as the cards beside it are"
    link = f"[{source}]({card.name})"
    assert f"| {link} |" in overview.read_text(), f"add to the table in {overview}: | {link} | … |"


def test_every_score_is_in_the_table_of_its_card() -> None:
    names = set(re.findall(r"`(\w+)`", (DOCS / "masks" / "topk.md").read_text()))
    missing = sorted(SCORES.keys() - names)
    assert not missing, f"docs/masks/topk.md: add {', '.join(missing)} to the table, in the column `by`"


def test_every_card_is_of_a_source_and_every_config_of_the_overview_makes_it() -> None:
    overview = (DOCS / "masks" / "README.md").read_text()
    configs = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \| `(\w+)` \|", overview, flags=re.MULTILINE))
    without_source = {card.stem for card in CARDS["masks"]} - {file_name(source) for source in SOURCES}
    assert not without_source, f"docs/masks: remove {without_source}, or add the source to masks/__init__.py"
    assert len(configs) > 9
    for source, name in configs.items():
        text = (ROOT / "conf" / "policy" / f"{name}.yaml").read_text()
        ((key, node),) = yaml.safe_load(text.replace("${trainer.max_epochs}", "12")).items()
        assert key == name
        assert isinstance(instantiate(node).mask, SOURCES[source])
