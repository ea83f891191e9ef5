import pytest

from gradpolicy.errors import brief, nearest, shown, unknown


def test_a_value_is_shown_in_one_line_and_cut_where_it_is_long():
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown(list(range(5000)))) == 80
    assert brief("one\n   two") == "one two"
    assert "\n" not in shown(type("Lines", (), {"__repr__": lambda self: "one\ntwo"})())


def test_case_does_not_matter():
    assert nearest("RELU", ["relu", "floor"], count=1) == "did you mean 'relu'?"


def test_a_class_is_named_and_not_its_module():
    assert nearest("Rondom", ["Random", "random"]) == "did you mean 'Random'?"


def test_without_a_close_name_all_are_listed_where_they_are_few():
    assert nearest("zzz", ["b", "a"]) == "valid names: 'a', 'b'"


def test_a_long_list_is_cut():
    listed = nearest("zzz", [f"name{number:02}" for number in range(20)])
    assert listed.endswith("'name11', …")


def test_without_candidates_nothing_is_said():
    assert nearest("a", []) == ""
    assert str(unknown("rule", "a", [])) == "unknown rule 'a'"


@pytest.mark.parametrize("name", ["", "quantiser with a very long name indeed"])
def test_any_name_gives_a_message(name):
    assert "unknown operation" in str(unknown("operation", name, ["relu"]))
