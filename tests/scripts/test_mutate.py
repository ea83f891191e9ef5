"""What the mutation run changes, how it judges, and that it leaves the code as it was."""

import ast
from pathlib import Path

import mutate
import pytest
from mutate import NOTICED, ROOMS, ROOT, SURVIVED, TOO_LONG, Mutation, chosen, judge, mutations_of

SOURCE = """
def limited(value: int, least: int = 0) -> int:
    \"\"\"Not below a bound; 0 stays as it is here.\"\"\"
    if value < least and not value == 7:
        value += 1
        return least
    return value + 0
"""
TEST = """
from gradpolicy.masks.limits import limited


def test_small_values_are_limited():
    assert limited(-1) == 0
    assert limited(3) == 3
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A small repository of the same shape."""
    (tmp_path / "gradpolicy" / "masks").mkdir(parents=True)
    (tmp_path / "gradpolicy" / "masks" / "limits.py").write_text(SOURCE)
    (tmp_path / "tests" / "masks").mkdir(parents=True)
    (tmp_path / "tests" / "masks" / "test_limits.py").write_text(TEST)
    (tmp_path / "pyproject.toml").write_text('[tool.pytest.ini_options]\nmarkers = ["slow: takes long"]\n')
    return tmp_path


def found(clone: Path) -> dict[tuple[str, str], Mutation]:
    return {(each.before, each.after): each for each in mutations_of(clone, "gradpolicy/masks/limits.py")}


def test_each_kind_of_node_is_changed_and_no_annotation_or_docstring(clone: Path) -> None:
    changes = set(found(clone))
    assert changes >= {
        ("value < least", "(value <= least)"),
        ("value == 7", "(value != 7)"),
        ("not value == 7", "(value == 7)"),
        ("value < least and not value == 7", "(value < least or not value == 7)"),
        ("value < least and not value == 7", "(not (value < least and (not value == 7)))"),
        ("value += 1", "pass"),
        ("return least", "return None"),
        ("value + 0", "(value - 0)"),
        ("7", "(8)"),
    }
    assert not any("int" in before or "stays" in before for before, _ in changes)


def test_a_change_keeps_the_rest_of_the_file(clone: Path) -> None:
    mutation = found(clone)["value == 7", "(value != 7)"]
    assert mutation.source == SOURCE.replace("value == 7", "(value != 7)")
    assert (mutation.file, mutation.line) == ("gradpolicy/masks/limits.py", 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "verdict"), [(("value == 7", "(value != 7)"), NOTICED), (("7", "(8)"), SURVIVED)]
)
def test_what_tests_notice_is_told_from_what_they_do_not(
    clone: Path, change: tuple[str, str], verdict: str
) -> None:
    assert judge(clone, found(clone)[change], 60.0) == verdict
    assert (clone / "gradpolicy" / "masks" / "limits.py").read_text() == SOURCE


@pytest.mark.slow
@pytest.mark.parametrize(("seconds", "verdict"), [(60.0, NOTICED), (0.0, SURVIVED)])
def test_slow_tests_are_asked_last(clone: Path, seconds: float, verdict: str) -> None:
    (clone / "tests" / "masks" / "test_slowly.py").write_text(
        "import pytest\n\nfrom gradpolicy.masks.limits import limited\n\n\n"
        "@pytest.mark.slow\ndef test_seven_is_not_limited():\n    assert limited(7, 9) == 7\n"
    )
    assert judge(clone, found(clone)["7", "(8)"], 60.0, seconds) == verdict


def test_tests_that_do_not_end_are_ended(clone: Path) -> None:
    endless = Mutation("gradpolicy/masks/limits.py", 1, "", "", SOURCE + "\nwhile True:\n    pass\n")
    assert judge(clone, endless, 3.0) == TOO_LONG


def test_every_change_to_the_package_can_be_parsed_and_is_one() -> None:
    for room in ROOMS:
        for mutation in chosen(ROOT, room, cases=8, seed=0):
            changed = ast.dump(ast.parse(mutation.source))
            assert changed != ast.dump(ast.parse((ROOT / mutation.file).read_text())), str(mutation)


def test_a_change_keeps_its_number_however_many_are_tried() -> None:
    few, many = (chosen(ROOT, "masks", cases, seed=1) for cases in (3, 20))
    assert many[:3] == few
    assert chosen(ROOT, "masks", 3, seed=2) != few


def test_without_a_green_start_nothing_is_tried(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(mutate, "passes", lambda *_: False)
    assert mutate.main(["--room", "masks"]) == 2
    assert "fail without any change" in capsys.readouterr().out
