"""Layers are found in the names of the parameters."""

import pytest

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.layers import find_layers

TRANSFORMER = [
    "wte.weight",
    "wpe.weight",
    "h.0.attn.weight",
    "h.0.mlp.0.weight",
    "h.1.attn.weight",
    "h.1.mlp.0.weight",
    "ln_f.weight",
    "head.weight",
]


def names(layers: list) -> list[tuple[str, bool]]:
    return [(layer.name, layer.numbered) for layer in layers]


def test_the_outermost_number_makes_the_layer() -> None:
    layers = find_layers(TRANSFORMER)
    assert names(layers) == [("wte+wpe", False), ("h.0", True), ("h.1", True), ("ln_f+head", False)]
    assert layers[1].parameters == ("h.0.attn.weight", "h.0.mlp.0.weight")


def test_without_numbers_each_module_is_a_layer() -> None:
    layers = find_layers(["fc1.weight", "fc1.bias", "fc2.weight", "scale"])
    assert names(layers) == [("fc1", True), ("fc2", True), ("scale", True)]


def test_the_number_of_a_parameter_in_a_list_is_no_layer() -> None:
    assert names(find_layers(["alphas.0", "alphas.1"])) == [("alphas", True)]


def test_members_of_several_stacks_are_all_layers() -> None:
    found = find_layers(["stem.w", "layer1.0.w", "layer1.1.w", "down.w", "layer2.0.w", "fc.w"])
    assert names(found) == [
        ("stem", False),
        ("layer1.0", True),
        ("layer1.1", True),
        ("down", False),
        ("layer2.0", True),
        ("fc", False),
    ]


def test_parameters_of_one_layer_may_lie_apart() -> None:
    layers = find_layers(["h.0.a", "norm.w", "h.0.b"])
    assert [layer.parameters for layer in layers] == [("h.0.a", "h.0.b"), ("norm.w",)]


def test_the_stacks_that_count_can_be_named() -> None:
    nested = ["0.weight", "1.blocks.0.weight", "1.blocks.1.weight", "2.weight"]
    assert names(find_layers(nested, "1.blocks")) == [
        ("0", False),
        ("1.blocks.0", True),
        ("1.blocks.1", True),
        ("2", False),
    ]


@pytest.mark.parametrize(
    "source", [lambda g: gp.masks.BlockCyclic(blocks=g), lambda g: gp.masks.Gradual(groups=g)]
)
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("head.*", r"(blocks|groups): must be a list of groups, .* got 'head.\*'"),
        ([], "must name at least one glob in each"),
        (["head.*", []], "must name at least one glob in each"),
    ],
)
def test_groups_that_are_given_name_something(source, groups, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        source(groups)


def test_a_stack_that_does_not_exist_is_an_error_with_the_nearest() -> None:
    with pytest.raises(PolicyError, match=r"did you mean 'h'"):
        find_layers(TRANSFORMER, "hh")
    with pytest.raises(PolicyError, match="no parameter lies in a numbered container"):
        find_layers(["fc.weight"], "layers")
