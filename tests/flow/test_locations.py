"""Where a policy acts in a model."""

import pytest
from torch import nn

import gradpolicy as gp
from gradpolicy.flow.locations import describe_location, find_locations

ENCODER = {"encoder", "encoder.body", "encoder.body.0", "encoder.body.1", "encoder.head"}


@pytest.fixture
def model():
    inner = nn.ModuleDict({"body": nn.Sequential(nn.Linear(2, 2), nn.ReLU()), "head": nn.Linear(2, 2)})
    return nn.ModuleDict({"encoder": inner, "decoder": nn.ReLU()})


@pytest.mark.parametrize(
    ("modules", "inside"),
    [
        (
            None,
            {"", "encoder", "encoder.body", "encoder.body.0", "encoder.body.1", "encoder.head", "decoder"},
        ),
        ("encoder", ENCODER),
        (["encoder", "!encoder.body"], {"encoder", "encoder.head"}),
        (["*", "!encoder"], {"", "decoder"}),
        (nn.ReLU, {"encoder.body.1", "decoder"}),
    ],
)
def test_an_operation_s_policy_acts_inside_the_matched_modules_and_those_below(modules, inside, model):
    locations = find_locations(model, "it", gp.UseRule("identity", ops="relu", modules=modules))
    assert set(locations.inside.values()) == inside
    assert {id(model.get_submodule(name)) for name in inside} == set(locations.inside)
    assert [operation.name for operation in locations.operations] == ["relu"]


def test_a_policy_at_a_boundary_acts_at_the_matched_modules_only(model):
    locations = find_locations(model, "it", gp.Scale(2.0, modules="encoder", at="output"))
    assert (locations.side, set(locations.boundaries)) == ("output", {id(model["encoder"])})
    assert not locations.inside


@pytest.mark.parametrize(
    ("policy", "text"),
    [
        (gp.UseRule("identity", ops=["round", "relu"]), "ops round, relu in whole model"),
        (gp.StraightThrough(ops="round", modules=["a.*", nn.ReLU]), "ops round in modules a.*, ReLU"),
        (gp.Scale(2.0, modules="a"), "input of modules a"),
        (gp.Stop(params="a.*"), "params a.*"),
    ],
)
def test_a_location_is_described_as_a_person_writes_it(policy, text):
    assert describe_location(policy) == text
