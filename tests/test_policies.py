import pickle

import pytest
import torch

import gradpolicy as gp
from gradpolicy.policies import FlowPolicy, Policy
from gradpolicy.where import STEP_OPERATIONS


def test_what_is_a_policys_own_may_be_positional():
    rules = {
        gp.StraightThrough("tanh"): ("tanh", {}),
        gp.StraightThrough("tanh", parameters={"slope": 3.0}): ("tanh", {"slope": 3.0}),
        gp.Scale(0.5, modules="a"): ("scale", {"factor": 0.5}),
        gp.Reverse(2.0, modules="a"): ("reverse", {"factor": 2.0}),
        gp.UseRule("gate", ops="where"): ("gate", {}),
        gp.Clip(norm=2, per_sample=True, modules="a"): ("clip_norm", {"norm": 2.0, "per_sample": True}),
        gp.Clip(value=0.1, modules="a"): ("clip_value", {"value": 0.1}),
    }
    assert {policy: (policy.rule.name, policy.rule.parameters) for policy in rules} == rules
    assert gp.Stop("zero", modules="a").mode == "zero"
    assert gp.Freeze(torch.tensor(True)).params == ("*",)


def test_policies_have_defaults_for_where_and_when():
    assert gp.Guided().ops == gp.Deconv().ops == ("relu",)
    assert gp.StraightThrough().ops == STEP_OPERATIONS
    assert gp.StraightThrough().rule.name == "identity"
    assert gp.Guided().when == gp.When()
    when = gp.When(phases="test")
    assert gp.Guided(when=when).when is when


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
        (lambda: gp.Scale("half", modules="a"), r"factor: expected a number, or a function of the step"),
        (lambda: gp.Scale(lambda: 1.0, modules="a"), r"Scale\.factor: must take the count alone"),
        (lambda: gp.Clip(modules="a"), r"Clip: give exactly one of value= and norm="),
        (lambda: gp.Clip(norm=0.0, modules="a"), r"Clip.norm: expected a number above 0, got 0.0"),
        (lambda: gp.Clip(value=1.0, per_sample=True, modules="a"), r"Clip.per_sample: goes with norm="),
        (lambda: gp.Freeze(torch.tensor(True), frozen_state="keeep"), r"Freeze.frozen_state: .*'keep'"),
        (lambda: gp.Freeze(torch.tensor(True), bias_correction="row"), r"Freeze.bias_correction: unknown"),
        (
            lambda: gp.Freeze(torch.tensor(True), params=None),
            r"Freeze\.params: names no parameter; '\*' means",
        ),
        # Arguments that a policy does not have.
        (lambda: gp.Scale(facter=2.0, modules="fc"), "Scale: .*'facter'; did you mean 'factor'"),
        (lambda: gp.Freeze(masks=torch.tensor(True)), "Freeze: .*'masks'; did you mean 'mask'"),
        (lambda: gp.When(phase="fit"), "When: takes no argument 'phase'; did you mean 'phases'"),
    ],
)
def test_wrong_input_names_the_key(make, message):
    with pytest.raises(gp.PolicyError, match=message):
        make()


def test_a_policy_of_ones_own_takes_its_arguments_and_those_that_it_passes_on():
    class Halve(gp.Scale):
        def __init__(self, *, twice: bool = False, **where_and_when):
            super().__init__(0.25 if twice else 0.5, **where_and_when)

    class HalveTrunk(gp.Scale):
        def __init__(self):
            super().__init__(0.5, modules="trunk")

    assert Halve(twice=True, modules="a").rule.parameters == {"factor": 0.25}
    with pytest.raises(gp.PolicyError, match="Halve: takes no argument 'twise'; did you mean 'twice'"):
        Halve(twise=True, modules="a")
    assert HalveTrunk().modules == ("trunk",)
    with pytest.raises(gp.PolicyError, match="HalveTrunk: takes no argument 'modules'"):
        HalveTrunk(modules="head")
