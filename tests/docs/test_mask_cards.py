"""The cards of the mask sources: snippets run, pictures exist, no source and no config is missing."""

import re
from pathlib import Path

import pytest
import yaml
from hydra.utils import instantiate

import gradpolicy as gp

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "docs" / "masks"
CARDS = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")
SOURCES = [
    name
    for name in gp.masks.__all__
    if isinstance(getattr(gp.masks, name), type)
    and issubclass(getattr(gp.masks, name), gp.masks.MaskSource)
    and name != "MaskSource"
]
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
def test_its_picture_exists_and_is_small(card: Path) -> None:
    pictures = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", card.read_text())
    assert pictures == [f"pictures/{card.stem}.png"]
    assert all((FOLDER / picture).stat().st_size < 60 * 1024 for picture in pictures)


def test_every_source_has_a_card_and_a_line_in_the_overview() -> None:
    overview = (FOLDER / "README.md").read_text()
    assert {card.stem for card in CARDS} == {file_name(source) for source in SOURCES}
    assert all(f"[{source}]({file_name(source)}.md)" in overview for source in SOURCES)


@pytest.mark.parametrize("source", [source for source in SOURCES if source != "Function"])
def test_every_source_has_a_config_of_its_name(source: str) -> None:
    path = ROOT / "conf" / "policy" / f"{file_name(source)}.yaml"
    ((name, node),) = yaml.safe_load(path.read_text().replace("${trainer.max_epochs}", "12")).items()
    assert name == file_name(source)
    assert isinstance(instantiate(node).mask, getattr(gp.masks, source))
