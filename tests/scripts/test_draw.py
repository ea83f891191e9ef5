"""The program that draws the pictures of the documentation."""

import re
from pathlib import Path

import draw
import pytest
from PIL import Image

from drawing import cards, home, masks


def test_the_pictures_of_the_readme_are_some_that_the_script_draws() -> None:
    readme = (home.ROOT / "README.md").read_text()
    shown = [home.ROOT / name for name in re.findall(r"!\[[^]]*\]\(([^)]+)\)", readme)]
    drawn = [group.FOLDER / f"{name}.png" for group in (home, cards) for name in group.PICTURES]
    assert shown
    assert all(path.is_file() and path in drawn for path in shown)


@pytest.mark.parametrize("group", [cards, masks], ids=["cards", "masks"])
def test_every_picture_of_the_cards_can_be_drawn_again(group) -> None:
    assert {path.stem for path in group.FOLDER.glob("*.png")} == set(group.PICTURES)


def test_the_command_line_draws_what_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw.main(["cards", "stop", "--folder", str(tmp_path)])
    assert "stop.png" in capsys.readouterr().out
    with Image.open(tmp_path / "stop.png") as picture:
        assert picture.width > picture.height > 100
