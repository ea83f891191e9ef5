"""The program that draws the pictures of the documentation."""

from pathlib import Path

import draw
import pytest
from matplotlib.figure import Figure
from PIL import Image

from drawing import cards, masks


@pytest.mark.parametrize("group", [cards, masks], ids=["cards", "masks"])
def test_every_picture_of_the_cards_can_be_drawn_again(group) -> None:
    assert {path.stem for path in group.FOLDER.glob("*.png")} == set(group.PICTURES)


@pytest.mark.parametrize("name", ["gate", "sampling", "straight_through"])
def test_a_picture_draws_curves(name: str) -> None:
    canvas = cards.PICTURES[name]()
    assert isinstance(canvas, Figure)
    assert all(axes.lines or axes.collections for axes in canvas.axes)


def test_the_command_line_draws_what_it_names(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    draw.main(["cards", "stop", "--folder", str(tmp_path)])
    assert "stop.png" in capsys.readouterr().out
    with Image.open(tmp_path / "stop.png") as picture:
        assert picture.width > picture.height > 100


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["cards", "guide"], "did you mean 'guided'"), (["card"], "choose from")],
)
def test_an_unknown_picture_or_group_names_what_there_is(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        draw.main(arguments)
    assert words in capsys.readouterr().err
