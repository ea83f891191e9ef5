import importlib.util
import sys
from pathlib import Path

import pytest
from matplotlib.figure import Figure
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "scripts" / "draw_cards.py"


@pytest.fixture(scope="module")
def draw_cards():
    description = importlib.util.spec_from_file_location("draw_cards", SCRIPT)
    module = importlib.util.module_from_spec(description)
    description.loader.exec_module(module)
    return module


def test_every_picture_of_the_cards_can_be_drawn_again(draw_cards):
    assert {path.stem for path in draw_cards.FOLDER.glob("*.png")} == set(draw_cards.PICTURES)


@pytest.mark.parametrize("name", ["gate", "sampling", "straight_through"])
def test_a_picture_draws_curves(draw_cards, name):
    canvas = draw_cards.PICTURES[name]()
    assert isinstance(canvas, Figure)
    assert all(axes.lines or axes.collections for axes in canvas.axes)


def test_the_command_line_draws_what_it_names(draw_cards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw_cards.py", "stop", "--folder", str(tmp_path)])
    draw_cards.main()
    assert "stop.png" in capsys.readouterr().out
    with Image.open(tmp_path / "stop.png") as picture:
        assert picture.width > picture.height > 100


def test_an_unknown_picture_names_the_nearest(draw_cards, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["draw_cards.py", "guide"])
    with pytest.raises(SystemExit):
        draw_cards.main()
    assert "did you mean 'guided'" in capsys.readouterr().err
