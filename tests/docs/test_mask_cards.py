"""The cards of the mask sources: snippets run, pictures exist, no source and no config is missing."""

import re
from pathlib import Path

import pytest
import yaml
from hydra.utils import instantiate

import gradpolicy as gp
from gradpolicy.masks import SOURCES

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "masks"
CARDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
each_card = pytest.mark.parametrize("card", CARDS, ids=[card.stem for card in CARDS])


def file_name(source: str) -> str:
    """``TopK`` → ``topk``, ``PruneAndGrow`` → ``prune_and_grow``."""
    return {"TopK": "topk"}.get(source) or re.sub(r"(?<!^)(?=[A-Z])", "_", source).lower()


def snippets(card: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", card.read_text(), flags=re.DOTALL | re.MULTILINE)


@pytest.mark.filterwarnings("error::UserWarning")
@each_card
def test_the_python_runs_as_it_stands(card: Path) -> None:
    blocks = snippets(card, "python")
    assert blocks
    exec(compile("\n".join(blocks), card.name, "exec"), {"__name__": "card"})


@each_card
def test_the_yaml_makes_policies(card: Path) -> None:
    blocks = snippets(card, "yaml")
    assert blocks
    for block in blocks:
        for node in yaml.safe_load(block).values():
            if card.stem == "function":
                node["mask"]["function"]["_target_"] = "torch.where"
            assert isinstance(instantiate(node), gp.Freeze)


@each_card
def test_a_card_has_every_part(card: Path) -> None:
    text = card.read_text()
    for part in (
        "| active entries | frozen entries |",
        "## YAML",
        "## Plain PyTorch",
        "## Parameters",
        "## Suggested settings",
        "## Trade-offs",
        "## Source",
    ):
        assert part in text, part


@each_card
def test_its_pictures_exist_and_are_small(card: Path) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", card.read_text())
    assert all((FOLDER / picture).stat().st_size < 60 * 1024 for picture in pictures)


@pytest.mark.parametrize("source", SOURCES)
def test_every_source_has_a_card_and_a_line_in_the_overview(source: str) -> None:
    card, overview = FOLDER / f"{file_name(source)}.md", FOLDER / "README.md"
    assert card.exists(), f"write {card}, as the cards beside it are"
    link = f"[{source}]({card.name})"
    assert f"| {link} |" in overview.read_text(), f"add to the table in {overview}: | {link} | … |"


def test_every_card_is_of_a_source_and_every_config_of_the_overview_makes_it() -> None:
    overview = (FOLDER / "README.md").read_text()
    configs = dict(re.findall(r"^\| \[(\w+)\]\(\w+\.md\) \| `(\w+)` \|", overview, flags=re.MULTILINE))
    assert {card.stem for card in CARDS} == {file_name(source) for source in SOURCES}
    assert len(configs) > 9
    for source, name in configs.items():
        text = (ROOT / "conf" / "policy" / f"{name}.yaml").read_text()
        ((key, node),) = yaml.safe_load(text.replace("${trainer.max_epochs}", "12")).items()
        assert key == name
        assert isinstance(instantiate(node).mask, SOURCES[source])
