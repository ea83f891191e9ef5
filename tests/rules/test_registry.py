import pytest
import torch

from gradpolicy import PolicyError, get_rule, rule, rule_names

NAMES_OF_THE_DESIGN = {
    *("stop", "identity", "scale", "reverse", "clip_value", "clip_norm", "guided_relu", "deconv_relu"),
    *("hardtanh", "tanh", "sigmoid", "fast_sigmoid", "arctan", "triangular", "approx_sign", "swish_sign"),
    *("bernoulli", "gumbel", "reinmax", "lsq", "rotation", "gate"),
}


def module_level_rule(grad, inputs, output, *, factor=2.0):
    return factor * grad


def test_every_promised_name_is_registered():
    assert set(rule_names()) >= NAMES_OF_THE_DESIGN


def test_register():
    @rule("registry_test_rule")
    def five_times(grad, inputs, output):
        return 5 * grad

    with pytest.raises(PolicyError, match=r"besides the built-in ones: .*'registry_test_rule'"):
        get_rule("no_such_rule")
    found = get_rule("registry_test_rule")
    x = torch.ones(2)
    assert found.function is five_times
    assert found(x, (x,), x).tolist() == [5.0, 5.0]
    assert get_rule(five_times) is found


def test_register_twice():
    def first(grad, inputs, output):
        return grad

    def second(grad, inputs, output):
        return grad

    rule("registry_test_twice")(first)
    rule("registry_test_twice")(first)
    with pytest.raises(PolicyError, match=r"registry_test_twice.*already registered.*first"):
        rule("registry_test_twice")(second)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: rule(module_level_rule), "under a name"),
        (lambda: rule("registry_test_short")(lambda grad: grad), r"must take \(grad, inputs, output\)"),
        (lambda: get_rule("guided_rule"), "unknown rule 'guided_rule'.*'guided_relu'"),
        (lambda: get_rule("no_such_package.rule"), "cannot be imported"),
        (lambda: get_rule("gradpolicy.rules.passing.no_such_rule"), "cannot be imported"),
        (lambda: get_rule(3), "a name, a dotted path or a function"),
        (lambda: get_rule("tanh", slop=2.0), "'tanh' has no parameter 'slop'.*'slope'"),
        (lambda: get_rule("identity", factor=2.0), "'identity' has no parameter 'factor'; it has none"),
    ],
)
def test_unknown_rules_are_refused(make, message):
    with pytest.raises(PolicyError, match=message):
        make()
