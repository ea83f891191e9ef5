import pytest
import torch
from torch import nn

from gradpolicy import PolicyError
from gradpolicy.where import (
    match_any,
    match_modules,
    match_names,
    match_parameters,
    pick,
)

NAMES = ["trunk.0.weight", "trunk.0.bias", "trunk.1.weight", "head.weight"]


@pytest.fixture
def model():
    return nn.ModuleDict(
        {
            "trunk": nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2)),
            "head": nn.Linear(2, 1),
        }
    )


def parameters(patterns):
    return match_names(patterns, NAMES, "parameter")


def test_globs_select_names_in_their_order():
    # A star crosses dots.
    assert parameters("trunk.*") == NAMES[:3]
    assert parameters("*.weight") == [NAMES[0], NAMES[2], NAMES[3]]
    assert parameters(["head.*", "trunk.0.*"]) == [NAMES[0], NAMES[1], NAMES[3]]
    # An exclamation mark takes away, wherever it stands; alone it means all but these.
    assert parameters(["trunk.*", "!*.bias"]) == parameters(["!*.bias", "trunk.*"]) == [NAMES[0], NAMES[2]]
    assert parameters("!trunk.*") == [NAMES[3]]
    assert match_any("head.*", NAMES, "parameter") == {NAMES[3]}
    assert match_any(None, NAMES, "parameter") == match_any([], NAMES, "parameter") == set()
    assert list(pick({name: torch.zeros(1) for name in NAMES}, "head.*")) == ["head.weight"]


def test_what_a_pattern_without_near_names_could_have_been(model):
    with pytest.raises(
        PolicyError, match=r"the model has trunk \(Sequential\), head \(Linear\), trunk\.0 \(Linear\), "
    ):
        match_modules(model, "xyz")


def test_no_text_and_taking_everything_away_are_errors(model):
    with pytest.raises(PolicyError, match="parameter pattern 3: expected a string"):
        parameters([3])
    with pytest.raises(PolicyError, match="exclude everything"):
        parameters(["head.*", "!*weight"])
    with pytest.raises(PolicyError, match="exclude everything"):
        match_modules(model, ["head", "!h*"])


def test_modules_by_glob_class_and_path(model):
    assert list(match_modules(model, "trunk.*")) == ["trunk.0", "trunk.1", "trunk.2"]
    assert list(match_modules(model, nn.Linear)) == ["trunk.0", "trunk.2", "head"]
    assert list(match_modules(model, "torch.nn.ReLU")) == ["trunk.1"]
    assert list(match_modules(model, ["trunk.*", "!torch.nn.Linear"])) == ["trunk.1"]
    # The model itself has the empty name.
    assert match_modules(model, "*")[""] is model
    assert list(match_modules(model, ["!trunk*"])) == ["", "head"]


def test_compiled_modules_are_matched_by_their_own_names(model):
    model["head"] = torch.compile(model["head"])
    assert "head" in match_modules(model, "head")
    assert list(match_parameters(model, "head.*")) == ["head.weight", "head.bias"]


def test_a_shared_parameter_is_found_by_any_of_its_names(model):
    model["head"].weight = model["trunk"][2].weight
    assert list(match_parameters(model, "head.*")) == ["trunk.2.weight", "head.bias"]
    assert list(match_parameters(model, ["*.weight", "!head.*"])) == ["trunk.0.weight"]
    assert list(match_parameters(model, ["*.weight", "!trunk.*.weight", "head.*"])) == ["head.bias"]
    with pytest.raises(PolicyError, match="exclude everything"):
        match_parameters(model, ["head.weight", "!trunk.2.weight"])


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("trunks.*", "module pattern 'trunks.*' matches nothing; did you mean 'trunk'"),
        (nn.GELU, "module class 'GELU' matches nothing"),
        ("torch.nn.Linaer", "module pattern 'torch.nn.Linaer' matches nothing"),
        ("no_such_package.Linear", "matches nothing"),
        (3, "expected a glob or a module class, got 3"),
    ],
)
def test_modules_that_do_not_exist(model, pattern, message):
    with pytest.raises(PolicyError, match=message.replace("*", r"\*")):
        match_modules(model, pattern)


@pytest.mark.parametrize("pattern", ["trunc.*", "trunk", "!trunc.*"])
def test_a_pattern_that_matches_nothing_names_the_nearest(pattern):
    with pytest.raises(PolicyError, match=r"pattern .* matches nothing; did you mean .*'trunk\.\*'"):
        parameters([pattern])
