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


def test_a_registered_function_is_returned_as_it_is_and_found_by_its_name():
    @rule("registry_test_rule")
    def five_times(grad, inputs, output):
        return 5 * grad

    found = get_rule("registry_test_rule")
    x = torch.ones(2)
    assert found.function is five_times
    assert found(x, (x,), x).tolist() == [5.0, 5.0]
    assert get_rule(five_times) is found


def test_registering_the_same_function_again_is_allowed_another_is_not():
    def first(grad, inputs, output):
        return grad

    def second(grad, inputs, output):
        return grad

    rule("registry_test_twice")(first)
    rule("registry_test_twice")(first)
    with pytest.raises(PolicyError, match=r"registry_test_twice.*already registered.*first"):
        rule("registry_test_twice")(second)


def test_a_dotted_path_means_the_function_there():
    path = f"{module_level_rule.__module__}.module_level_rule"
    assert get_rule(path).function is module_level_rule
    assert get_rule("gradpolicy.rules.passing.stop") is get_rule("stop")


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
def test_what_is_no_rule_is_refused_with_the_nearest_names(make, message):
    with pytest.raises(PolicyError, match=message):
        make()


def test_parameters_are_kept_and_the_original_stays():
    slow, fast = get_rule("tanh"), get_rule("tanh", slope=4.0)
    assert slow.parameters == {}
    assert fast.parameters == {"slope": 4.0}
    assert get_rule(fast, slope=5.0).parameters == {"slope": 5.0}
