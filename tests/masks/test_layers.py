"""Layers are found in the names and shapes of the parameters, as the model's own blocks."""

from collections.abc import Iterable

import pytest
import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError
from gradpolicy.masks.layers import find_layers
from gradpolicy.where import named_parameters, once_each

BLOCKS = ["h.0.attn.weight", "h.0.mlp.0.weight", "h.1.attn.weight", "h.1.mlp.0.weight"]
TRANSFORMER = ["wte.weight", "wpe.weight", *BLOCKS, "ln_f.weight", "head.weight"]


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


class Block(nn.Module):
    """The basic block of torchvision's ResNet: its modules and their names."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        if inputs != outputs:
            projection = nn.Conv2d(inputs, outputs, 1, bias=False)
            self.downsample = nn.Sequential(projection, nn.BatchNorm2d(outputs))


def resnet(widths: tuple[int, ...] = (4, 8), stem: nn.Module | None = None) -> nn.Module:
    """A ResNet with torchvision's names; with a deep stem, timm's."""
    model = nn.Module()
    model.conv1 = stem or nn.Conv2d(3, widths[0], 7, bias=False)
    model.bn1 = nn.BatchNorm2d(widths[0])
    for place, width in enumerate(widths):
        before = widths[max(place - 1, 0)]
        setattr(model, f"layer{place + 1}", nn.Sequential(Block(before, width), Block(width, width)))
    model.fc = nn.Linear(widths[-1], 2)
    return model


def deep_stem() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.BatchNorm2d(2), nn.ReLU(), nn.Conv2d(2, 4, 3))


@pytest.mark.parametrize("stem", [None, deep_stem()], ids=["torchvision", "timm"])
def test_a_resnet_goes_by_its_residual_blocks_after_a_stem_of_one_group(stem: nn.Module | None) -> None:
    found = written(named_parameters(resnet(stem=stem)))
    assert found == "~conv1+bn1 layer1.0 layer1.1 layer2.0 layer2.1 ~fc"


TWO = {"num_hidden_layers": 2, "vocab_size": 8, "hidden_size": 8, "intermediate_size": 8}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2}
HUGGING_FACE = {
    "BertForSequenceClassification": (
        {**TWO, "num_attention_heads": 2},
        "~bert.embeddings bert.encoder.layer.0 bert.encoder.layer.1 ~bert.pooler ~classifier",
    ),
    "GPT2LMHeadModel": (
        {"n_layer": 2, "n_embd": 8, "n_head": 2, "vocab_size": 8, "tie_word_embeddings": False},
        "~transformer.wte+transformer.wpe transformer.h.0 transformer.h.1 ~transformer.ln_f+lm_head",
    ),
    "LlamaForCausalLM": (
        {**TWO, **HEADS},
        "~model.embed_tokens model.layers.0 model.layers.1 ~model.norm+lm_head",
    ),
    "MixtralForCausalLM": (
        {**TWO, **HEADS},
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


PARTS = ("attn.weight", "mlp.weight", "norm.bias")


@pytest.mark.parametrize(
    ("before", "blocks", "after", "expected"),
    [
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
    ids=["torchvision ViT", "torchvision EfficientNet", "timm EfficientNet"],
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
    biases = {name: tensor for name, tensor in named_parameters(resnet()).items() if name.endswith("bias")}
    assert written(biases) == "~bn1 layer1.0 layer1.1 layer2.0 layer2.1 ~fc"


# ---- models without stacks of blocks


def test_the_outermost_number_makes_the_layer() -> None:
    assert written(tensors(TRANSFORMER)) == "~wte+wpe h.0 h.1 ~ln_f+head"
    assert find_layers(tensors(TRANSFORMER))[1].parameters == ("h.0.attn.weight", "h.0.mlp.0.weight")


def test_without_numbers_each_module_is_a_layer_with_the_norm_behind_it() -> None:
    parameters = tensors(["conv1.weight", "bn1.weight", "conv2.weight", "bn2.weight", "fc.weight", "fc.bias"])
    assert written(parameters) == "conv1+bn1 conv2+bn2 fc"
    assert written(tensors(["fc1.weight", "fc1.bias", "fc2.weight", "scale"])) == "fc1 fc2 scale"


def test_members_of_several_stacks_are_all_layers() -> None:
    found = written(tensors(["stem.w", "layer1.0.w", "layer1.1.w", "down.w", "layer2.0.w", "fc.w"]))
    assert found == "~stem layer1.0 layer1.1 ~down layer2.0 ~fc"


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
        ({}, "must name at least one glob in each"),
        (["head.*", []], "must name at least one glob in each"),
        ({"top": []}, "must name at least one glob in each"),
        (["head.*", "head.*"], "must name each group once"),
    ],
)
def test_groups_that_are_given_name_something(source, groups, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        source(groups=groups)
