import pickle

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.policies import FlowPolicy, Policy
from gradpolicy.where import STEP_OPERATIONS


def test_what_is_a_policys_own_may_be_positional():
    assert gp.Stop("zero", modules="a").mode == "zero"
    assert gp.StraightThrough("tanh").rule.name == "tanh"
    assert gp.Scale(0.5, modules="a").rule.parameters == {"factor": 0.5}
    assert gp.Reverse(2.0, modules="a").rule.parameters == {"factor": 2.0}
    assert gp.UseRule("gate", ops="where").rule.name == "gate"
    assert gp.Freeze(torch.tensor(True)).params == ("*",)


def test_unless_told_otherwise_guided_and_deconv_mean_every_relu_and_straight_through_every_step():
    assert gp.Guided().ops == gp.Deconv().ops == ("relu",)
    assert gp.StraightThrough().ops == STEP_OPERATIONS
    assert gp.StraightThrough().rule.name == "identity"


def test_policies_hold_in_fit_unless_told_otherwise():
    assert gp.Guided().when == gp.When()
    when = gp.When(phases="test")
    assert gp.Guided(when=when).when is when


def test_clip_makes_the_rule_that_its_bound_means():
    by_norm, by_value = gp.Clip(norm=2, per_sample=True, modules="a"), gp.Clip(value=0.1, modules="a")
    assert (by_norm.rule.name, by_norm.rule.parameters) == ("clip_norm", {"norm": 2.0, "per_sample": True})
    assert (by_value.rule.name, by_value.rule.parameters) == ("clip_value", {"value": 0.1})


def test_parameters_reach_the_rule():
    assert gp.StraightThrough("tanh", parameters={"slope": 3.0}).rule.parameters == {"slope": 3.0}
    schedule = gp.schedules.Linear(1, 3, steps=10)
    assert gp.UseRule("tanh", parameters={"slope": schedule}, ops="sign").rule.parameters == {
        "slope": schedule
    }


@pytest.mark.parametrize(
    "policy",
    [
        gp.Stop(modules="a"),
        gp.StraightThrough("swish_sign"),
        gp.Reverse(gp.schedules.Ganin(steps=10), modules=torch.nn.ReLU),
        gp.Clip(norm=1.0, params="*.weight"),
        gp.Freeze(gp.masks.Random(0.5)),
    ],
    ids=repr,
)
def test_a_policy_can_be_pickled_and_tells_what_it_is(policy):
    copy = pickle.loads(pickle.dumps(policy))
    assert isinstance(copy, Policy)
    assert repr(copy) == repr(policy)
    assert repr(policy).startswith(type(policy).__name__)
    if isinstance(policy, FlowPolicy):
        assert copy.rule == policy.rule


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gp.Guided(ops=["relu", 3]), r"Guided\.ops: an operation is a name or a torch function"),
        (lambda: gp.Stop(), r"Stop: say where it acts: modules=, ops= or params="),
        (
            lambda: gp.Stop("detatch", modules="a"),
            r"Stop.mode: unknown mode 'detatch'; did you mean 'detach'",
        ),
        (lambda: gp.Stop(modules="a", at="middle"), r"Stop.at: unknown boundary 'middle'.*'input'"),
        (lambda: gp.Stop(modules="a", params="b"), r"params= stands alone"),
        (lambda: gp.Stop(modules="a", when="fit"), r"when must be a gradpolicy.When, got 'fit'"),
        (lambda: gp.StraightThrough("tahn"), r"unknown rule 'tahn'; did you mean 'tanh'"),
        (lambda: gp.StraightThrough(parameters={"slope": 1}), r"'identity' has no parameter 'slope'"),
        (lambda: gp.UseRule("scale", modules="a"), r"UseRule: rule 'scale' needs a value for factor"),
        (lambda: gp.Scale("half", modules="a"), r"factor: must be a number, or a function of the step"),
        (lambda: gp.Scale(True, modules="a"), r"factor: must be a number"),
        (lambda: gp.Clip(modules="a"), r"Clip: give exactly one of value= and norm="),
        (lambda: gp.Clip(value=1.0, norm=1.0, modules="a"), r"Clip: give exactly one"),
        (lambda: gp.Clip(norm=0.0, modules="a"), r"Clip.norm: must be a number above 0, got 0.0"),
        (lambda: gp.Clip(value="1", modules="a"), r"Clip.value: must be a number above 0, got '1'"),
        (lambda: gp.Clip(value=1.0, per_sample=True, modules="a"), r"Clip.per_sample: goes with norm="),
        (lambda: gp.Freeze(torch.tensor(True), frozen_state="keeep"), r"Freeze.frozen_state: .*'keep'"),
        (lambda: gp.Freeze(torch.tensor(True), bias_correction="row"), r"Freeze.bias_correction: unknown"),
    ],
)
def test_wrong_input_names_the_key(make, message):
    with pytest.raises(gp.PolicyError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gp.Scale(2.0, module="fc"), "Scale: takes no argument 'module'; did you mean 'modules'"),
        (
            lambda: gp.Scale(facter=2.0, modules="fc"),
            "Scale: takes no argument 'facter'; did you mean 'factor'",
        ),
        (
            lambda: gp.StraightThrough(surogate="tanh"),
            "StraightThrough: .*'surogate'; did you mean 'surrogate'",
        ),
        (lambda: gp.Freeze(torch.tensor(True), param="x"), "Freeze: .*'param'; did you mean 'params'"),
        (lambda: gp.Freeze(masks=torch.tensor(True)), "Freeze: .*'masks'; did you mean 'mask'"),
        (lambda: gp.When(phase="fit"), "When: takes no argument 'phase'; did you mean 'phases'"),
    ],
)
def test_an_unknown_argument_is_refused_by_name_with_the_nearest(make, message):
    with pytest.raises(PolicyError, match=message):
        make()


def test_a_policy_of_ones_own_takes_its_own_arguments_beside_those_of_its_base():
    class Halve(gp.Scale):
        def __init__(self, *, twice: bool = False, **where_and_when):
            super().__init__(0.25 if twice else 0.5, **where_and_when)

    assert Halve(twice=True, modules="a").rule.parameters == {"factor": 0.25}
    with pytest.raises(PolicyError, match="Halve: takes no argument 'twise'; did you mean 'twice'"):
        Halve(twise=True, modules="a")


def test_a_policy_of_ones_own_may_say_itself_where_it_acts():
    class HalveTrunk(gp.Scale):
        def __init__(self):
            super().__init__(0.5, modules="trunk")

    assert HalveTrunk().modules == ("trunk",)
    with pytest.raises(PolicyError, match="HalveTrunk: takes no argument 'modules'"):
        HalveTrunk(modules="head")


@pytest.mark.parametrize("params", [None, []])
def test_freeze_without_a_pattern_is_refused(params):
    with pytest.raises(PolicyError, match=r"Freeze\.params: names no parameter; '\*' means all"):
        gp.Freeze(torch.tensor(True), params=params)
