import pytest

from gradpolicy.errors import brief, nearest, shown, unknown


def test_a_value_is_shown_in_one_line_and_cut_where_it_is_long():
    assert shown("a\nb") == "'a\\nb'"
    assert len(shown(list(range(5000)))) == 80
    assert brief("one\n   two") == "one two"
    assert "\n" not in shown(type("Lines", (), {"__repr__": lambda self: "one\ntwo"})())


def test_a_close_name_or_else_the_first_of_all_are_listed_in_any_case():
    assert nearest("RELU", ["relu", "floor"], count=1) == "did you mean 'relu'?"
    # A class, and not its module.
    assert nearest("Rondom", ["Random", "random"]) == "did you mean 'Random'?"
    assert nearest("zzz", ["b", "a"]) == "valid names: 'a', 'b'"
    assert nearest("zzz", [f"name{number:02}" for number in range(20)]).endswith("'name11', …")
    assert nearest("a", []) == ""
    assert str(unknown("rule", "a", [])) == "unknown rule 'a'"


@pytest.mark.parametrize("name", ["", "quantiser with a very long name indeed"])
def test_any_name_gives_a_message(name):
    assert "unknown operation" in str(unknown("operation", name, ["relu"]))
