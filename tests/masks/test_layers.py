"""Layers are found in the names and shapes of the parameters, as the model's own blocks."""

from collections.abc import Iterable

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.layers import find_layers
from gradpolicy.where import named_parameters, once_each


def tensors(names: Iterable[str]) -> dict[str, torch.Tensor]:
    """Matrices under these names; norms and biases are vectors."""
    vectors = ("bias", "bn", "norm", "ln")
    return {name: torch.zeros([2] if any(each in name for each in vectors) else [2, 2]) for name in names}


def written(parameters: dict[str, torch.Tensor]) -> str:
    """The layers in one line, with ~ before what lies outside the blocks."""
    found = find_layers(parameters)
    assert sorted(name for layer in found for name in layer.parameters) == sorted(parameters)
    return " ".join(f"{'' if layer.numbered else '~'}{layer.name}" for layer in found)


# ---- models of others


TWO = {"num_hidden_layers": 2, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
HUGGING_FACE = {
    "BertForSequenceClassification": (
        {**TWO, "num_attention_heads": 2},
        "~bert.embeddings bert.encoder.layer.0 bert.encoder.layer.1 ~bert.pooler ~classifier",
    ),
    "MixtralForCausalLM": (
        {**TWO, "num_attention_heads": 2, "num_key_value_heads": 2},
        "~model.embed_tokens model.layers.0 model.layers.0.mlp.gate model.layers.0.mlp.experts "
        "model.layers.1 model.layers.1.mlp.gate model.layers.1.mlp.experts ~model.norm+lm_head",
    ),
    "T5ForConditionalGeneration": (
        {"num_layers": 2, "d_model": 8, "d_kv": 4, "d_ff": 8, "num_heads": 2, "vocab_size": 8},
        "~shared encoder.block.0 encoder.block.1 ~encoder.final_layer_norm "
        "decoder.block.0 decoder.block.1 ~decoder.final_layer_norm",
    ),
}


@pytest.mark.parametrize("kind", HUGGING_FACE)
def test_models_of_transformers_go_by_their_blocks(kind: str) -> None:
    transformers = pytest.importorskip("transformers")
    settings, expected = HUGGING_FACE[kind]
    model = getattr(transformers, kind)
    with torch.device("meta"):
        assert written(once_each(named_parameters(model(model.config_class(**settings))))) == expected


UNUSED = [
    (["pooler.weight"], "~embed h.0 h.1 ~norm+head"),
    (["embed.weight"], "h.0 h.1 ~norm+pooler ~head"),
    (["h.1.v.weight", "h.1.w.weight"], "~embed h.0 ~norm+pooler ~head"),
    (["h.1.w.weight"], "~embed h.0 h.1 ~norm+pooler ~head"),
    ([f"h.{i}.{w}.weight" for i in range(2) for w in "vw"], "~embed+norm ~pooler ~head"),
]


@pytest.mark.parametrize(("idle", "expected"), UNUSED)
def test_parameters_without_a_gradient_make_no_layer(idle: list[str], expected: str) -> None:
    blocks = [f"h.{i}.{w}.weight" for i in range(2) for w in "vw"]
    parameters = tensors(["embed.weight", *blocks, "norm.weight", "pooler.weight", "head.weight"])
    found = find_layers(parameters, idle)
    assert " ".join(f"{'' if layer.numbered else '~'}{layer.name}" for layer in found) == expected
    assert not {name for layer in found for name in layer.parameters}.intersection(idle)
    assert find_layers(parameters, list(parameters)) == find_layers(parameters)


PARTS = ("attn.weight", "mlp.0.weight", "mlp.1.bias", "norm.bias")


@pytest.mark.parametrize(
    ("before", "blocks", "after", "expected"),
    [
        (
            ["conv1.0.weight", "conv1.1.bias", "conv1.3.weight", "bn1.bias"],
            ["layer1.0", "layer1.1", "layer2.0", "layer2.1"],
            ["fc.weight"],
            "~conv1+bn1 {} ~fc",
        ),
        (
            ["class_token", "conv_proj.weight", "encoder.pos_embedding"],
            ["encoder.layers.encoder_layer_0", "encoder.layers.encoder_layer_1"],
            ["encoder.ln.weight", "heads.head.weight"],
            "~class_token+conv_proj+encoder.pos_embedding {} ~encoder.ln+heads",
        ),
        (
            ["features.0.0.weight", "features.0.1.bias"],
            ["features.1.0", "features.1.1", "features.2.0", "features.2.1"],
            ["classifier.1.weight"],
            "features.0 {} ~classifier",
        ),
        (
            ["conv_stem.weight", "bn1.weight"],
            ["blocks.0.0", "blocks.0.1", "blocks.1.0", "blocks.1.1"],
            ["conv_head.weight", "bn2.weight", "classifier.weight"],
            "~conv_stem+bn1 {} ~conv_head+bn2 ~classifier",
        ),
    ],
    ids=["timm ResNet", "torchvision ViT", "torchvision EfficientNet", "timm EfficientNet"],
)
def test_other_namings_are_known(before, blocks, after, expected: str) -> None:
    inside = [f"{block}.{part}" for block in blocks for part in PARTS]
    assert written(tensors([*before, *inside, *after])) == expected.format(" ".join(blocks))


def test_experts_one_by_one_are_one_group_and_shared_ones_belong_to_the_block() -> None:
    parts = ("attn.q.weight", "attn.k.weight", "moe.gate.weight", "moe.shared_expert.up.weight")
    experts = [f"moe.experts.{i}.{part}.weight" for i in range(3) for part in ("up", "down")]
    found = written(tensors(f"layers.{i}.{part}" for i in range(2) for part in (*parts, *experts)))
    assert found == (
        "layers.0 layers.0.moe.gate layers.0.moe.experts layers.1 layers.1.moe.gate layers.1.moe.experts"
    )


def test_a_list_of_heads_in_a_block_leaves_the_block_whole() -> None:
    shapes = {f"heads.{head}.{part}": (2, 4) for head in range(2) for part in ("key", "query")}
    shapes |= {"feed.0": (16, 4), "feed.2": (4, 16)}
    blocks = {f"blocks.{i}.{part}.weight": torch.zeros(s) for i in range(2) for part, s in shapes.items()}
    assert written(blocks) == "blocks.0 blocks.1"


def test_biases_alone_are_grouped_as_the_model_is() -> None:
    blocks = ["layer1.0", "layer1.1", "layer2.0", "layer2.1"]
    inside = [f"{block}.bn{number}.bias" for block in blocks for number in (1, 2)]
    found = written(tensors(["bn1.bias", *inside, "layer2.0.downsample.1.bias", "fc.bias"]))
    assert found == f"~bn1 {' '.join(blocks)} ~fc"


def test_without_stacks_each_numbered_module_is_a_layer() -> None:
    found = written(tensors(["stem.w", "layer1.0.w", "layer1.1.w", "down.w", "layer2.0.w", "fc.w"]))
    assert found == "~stem layer1.0 layer1.1 ~down layer2.0 ~fc"


def test_without_numbers_each_module_is_a_layer_with_the_norm_behind_it() -> None:
    parameters = tensors(["conv1.weight", "bn1.weight", "conv2.weight", "bn2.weight", "fc.weight", "fc.bias"])
    assert written(parameters) == "conv1+bn1 conv2+bn2 fc"
    assert written(tensors(["fc1.weight", "fc1.bias", "fc2.weight", "scale"])) == "fc1 fc2 scale"


# ---- layers that are named

each_source = pytest.mark.parametrize("source", [gp.masks.Layerwise, gp.masks.BlockCyclic, gp.masks.Gradual])


@each_source
def test_every_source_of_layers_takes_groups_with_names(source, prepared) -> None:
    groups = {"front": ["embed.*", "blocks.0.*"], "rest": "blocks.[123].*", "top": ["head.*"]}
    ours = prepared(source(groups=groups))
    assert [layer.name for layer in ours.layer_groups] == ["front", "rest", "top"]
    assert ours.layer_groups[0].parameters == ("embed.weight", "blocks.0.weight", "blocks.0.bias")
    assert "'rest': ('blocks.[123].*',)" in repr(ours)


@each_source
def test_a_parameter_in_two_groups_is_an_error(source, prepared) -> None:
    with pytest.raises(PolicyError, match=r"groups: 'head\.weight' must be in one group, not 2"):
        prepared(source(groups=["*", "head.*"]))


def test_what_is_in_no_group_of_layerwise_always_trains(prepared) -> None:
    source = prepared(gp.masks.Layerwise(1, groups={"one": "blocks.0.*", "two": "blocks.1.*"}, every=1))
    for step in range(8):
        masks = source.masks(step, 0)
        assert masks["blocks.0.weight"] is not masks["blocks.1.weight"]
        assert all(masks[name] for name in ("embed.weight", "blocks.2.weight", "head.bias"))


@each_source
@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ("head.*", r"groups: must map names to globs, or be a list of groups, .* got 'head.\*'"),
        ([], "must name at least one glob in each"),
        (["head.*", []], "must name at least one glob in each"),
        (["head.*", "head.*"], "must name each group once"),
    ],
)
def test_groups_that_are_given_name_something(source, groups, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        source(groups=groups)
