"""Adapters of PEFT: they load there with the same bits, and come back byte for byte."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import gradpolicy as gp
from gradpolicy.errors import PolicyError

State = dict[str, Tensor]
SIZES = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 60,
}
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def llama(*, tied: bool, dtype: torch.dtype = torch.float32) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES, tie_word_embeddings=tied)).to(dtype).eval()


def bert(seed: int = 0) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(seed)
    return BertForSequenceClassification(BertConfig(**SIZES, num_labels=3)).eval()


def train_tokens(model: Any) -> None:
    with torch.no_grad():
        for layer in {model.get_input_embeddings(), model.get_output_embeddings()}:
            layer.weight[[5, 55]] -= 0.3


def train_entries(model: nn.Module) -> None:
    """Changes by which entries grow, shrink to almost nothing, and change their sign."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "down_proj.weight", "query.weight")):
                chosen = torch.rand(weight.shape, generator=generator) < 0.1
                new = 0.1 ** (6 * torch.rand(weight.shape, generator=generator)) * weight.float().sign()
                weight.copy_(torch.where(chosen, -new, weight))


def check_in_peft(base: Any, model: Any, directory: Path) -> None:
    """Check that PEFT gives the model's logits, and after merging the model's weights."""
    from peft import PeftModel

    tokens = torch.arange(12).view(2, 6) * 5
    adapted = PeftModel.from_pretrained(copy.deepcopy(base), directory)
    with torch.no_grad():
        expected = model(tokens).logits
        assert not torch.equal(base(tokens).logits, expected)
        assert torch.equal(adapted(tokens).logits, expected)
        merged = adapted.merge_and_unload()
        assert torch.equal(merged(tokens).logits, expected)
    assert all(torch.equal(merged.state_dict()[name], weight) for name, weight in model.state_dict().items())


def adapter_of(directory: Path) -> tuple[dict[str, Any], State]:
    config = json.loads((directory / "adapter_config.json").read_text())
    return config, load_file(directory / "adapter_model.safetensors")


def exported(model: Any, base: Any, path: Path, **options: Any) -> Path:
    """Save what changed as `a`, and as an adapter, whose directory is returned."""
    gp.delta.save(path / "a", model, base, **options)
    gp.delta.to_peft(path / "a", path / "adapter")
    return path / "adapter"


def check_back(path: Path, *bases: Any) -> None:
    """Check that the adapter becomes the same file, by itself and with each of these bases."""
    for base in (None, *bases):
        gp.delta.from_peft(path / "adapter", path / "b", base)
        assert (path / "b").read_bytes() == (path / "a").read_bytes()


# ---- there


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tied", [True, False])
def test_rows_of_tokens_give_the_same_bits_in_peft_and_come_back(tied, dtype, tmp_path, recwarn):
    base = llama(tied=tied, dtype=dtype)
    model = copy.deepcopy(base)
    train_tokens(model)
    adapter = exported(model, base, tmp_path)
    config, tensors = adapter_of(adapter)
    assert (config["peft_type"], config["token_indices"]) == ("TRAINABLE_TOKENS", [5, 55])
    assert {tensor.shape for tensor in tensors.values()} == {(2, 32)}
    check_in_peft(base, model, adapter)
    assert not [warning for warning in recwarn if "adapter" in str(warning.message)]
    check_back(tmp_path, base, base.state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
def test_entries_of_linear_layers_give_the_same_bits_in_peft_and_come_back(dtype, tmp_path):
    base = llama(tied=False, dtype=dtype)
    model = copy.deepcopy(base)
    train_entries(model)
    adapter = exported(model, base, tmp_path)
    config, tensors = adapter_of(adapter)
    assert config["peft_type"] == "SHIRA"
    assert {len(tensors[key]) for key in tensors if "q_proj.shira_weight" in key} == {config["r"] * 64}
    check_in_peft(base, model, adapter)
    check_back(tmp_path, base)


def test_layers_with_biases_and_a_new_head_go_into_one_adapter(tmp_path: Path) -> None:
    base = bert()
    model = copy.deepcopy(base)
    train_entries(model)
    model.classifier.load_state_dict(bert(seed=1).classifier.state_dict())
    with torch.no_grad():
        model.classifier.bias += 1.0
    adapter = exported(model, base, tmp_path, replaces="classifier.*")
    assert adapter_of(adapter)[0]["modules_to_save"] == ["classifier"]
    check_in_peft(base, model, adapter)
    # Another new head in the base makes no difference.
    other = copy.deepcopy(base)
    other.classifier.load_state_dict(bert(seed=2).classifier.state_dict())
    check_in_peft(other, model, adapter)
    check_back(tmp_path, other)


# ---- back, from adapters that PEFT has written


def test_adapters_that_peft_trained_become_deltas(tmp_path: Path) -> None:
    from peft import ShiraConfig, TrainableTokensConfig, get_peft_model

    base = llama(tied=True)
    for name, config in (
        ("tokens", TrainableTokensConfig(token_indices=[7, 3])),
        ("shira", ShiraConfig(r=2, target_modules=["q_proj"])),
    ):
        adapted = get_peft_model(copy.deepcopy(base), config)
        with torch.no_grad():
            for parameter in adapted.parameters():
                if parameter.requires_grad:
                    parameter += torch.randn(parameter.shape)
        adapted.save_pretrained(tmp_path / name)
        with pytest.raises(PolicyError, match="the model without the adapter is needed as base"):
            gp.delta.from_peft(tmp_path / name, tmp_path / f"{name}.delta")
        gp.delta.from_peft(tmp_path / name, tmp_path / f"{name}.delta", base)
        model = copy.deepcopy(base)
        gp.delta.apply(model, tmp_path / f"{name}.delta")
        expected = adapted.merge_and_unload().state_dict()
        assert all(torch.equal(expected[key], weight) for key, weight in model.state_dict().items())


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    base, model = {"a.weight": torch.zeros(20, 4)}, {"a.weight": torch.zeros(20, 4)}
    model["a.weight"][3] = 1.0
    return exported(model, base, tmp_path)


def test_an_adapter_that_was_trained_further_needs_its_base(adapter: Path, tmp_path: Path) -> None:
    file, base = adapter / "adapter_model.safetensors", {"a.weight": torch.zeros(20, 4)}
    save_file({key: tensor + 1.0 for key, tensor in load_file(file).items()}, file)
    with pytest.raises(PolicyError, match="has changed since it was written, so its base is needed"):
        gp.delta.from_peft(adapter, tmp_path / "b")
    gp.delta.from_peft(adapter, tmp_path / "b", base)
    gp.delta.apply(base, tmp_path / "b")
    assert base["a.weight"][3].tolist() == [2.0] * 4


# ---- what the formats do not allow


def changed(**places: object) -> Callable[[State], None]:
    def change(state: State) -> None:
        for name, place in places.items():
            state[name.replace("__", ".")][place] += 1.0

    return change


REFUSED: dict[str, tuple[Any, ...]] = {
    "nothing": (changed(), "no tensor differs from the base"),
    "a bias": (changed(linear__bias=1), "'linear.bias' changed; PEFT has rows and entries"),
    "a convolution": (changed(conv__weight=(0, 0, 0)), "'conv.weight' changed; PEFT"),
    "entries of an embedding": (
        changed(embed__weight=(1, 1)),
        "'embed.weight' is an embedding.* but 'embed.weight' changed in single entries",
    ),
    "different rows": (
        changed(embed__weight=1, linear__weight=2),
        "'embed.weight' is an embedding.* but 'linear.weight' changed in other rows than 'embed.weight'",
    ),
    "the head's bias": (
        changed(embed__weight=1, linear__weight=1),
        r"but PEFT would drop 'linear.bias' \(peft issue 3649\)",
    ),
    "rows beside a new head": (
        changed(embed__weight=1),
        "but 'linear.bias', which is replaced, cannot be saved there",
        "linear.*",
    ),
    "a part of a module": (
        changed(conv2d__weight=(1, 1)),
        "PEFT replaces complete modules, but 'linear.bias' is not replaced",
        "linear.weight",
    ),
    "too many entries": (
        changed(linear__weight=slice(0, 7), thin__weight=(0, 0)),
        "'linear.weight' needs r = 3, and 'thin.weight' allows at most 0",
    ),
    "infinite": (
        lambda state: state["linear.weight"].view(-1)[3:4].fill_(torch.inf),
        "'linear.weight' has values that no sum with the base gives",
    ),
}
"""What changes, the refusal, and what is replaced."""


@pytest.mark.parametrize("kind", REFUSED)
def test_what_peft_cannot_hold_is_refused_with_its_name(kind: str, tmp_path: Path) -> None:
    change, message, *replaces = REFUSED[kind]
    base = {
        "embed.weight": torch.zeros(20, 6),
        "linear.weight": torch.zeros(10, 6),
        "linear.bias": torch.zeros(10),
        "thin.weight": torch.zeros(1, 50),
        "conv.weight": torch.zeros(4, 4, 4),
        "conv2d.weight": torch.zeros(8, 8),
    }
    model = {name: tensor.clone() for name, tensor in base.items()}
    change(model)
    with pytest.raises(PolicyError, match=message) as caught:
        exported(model, base, tmp_path, replaces=replaces)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "adapter").exists()


def test_tied_names_need_one_that_is_the_input_embedding(tmp_path: Path) -> None:
    for names, columns, message in (
        (("shared.weight", "head.weight"), 4, "unclear which is the input embedding"),
        (("l.weight", "m.weight"), 1, "SHiRA has no tied weights"),
    ):
        base, model = torch.zeros(20, 4), torch.zeros(20, 4)
        model[3, :columns] = 1.0
        with pytest.raises(PolicyError, match=message):
            exported(dict.fromkeys(names, model), dict.fromkeys(names, base), tmp_path)


def test_no_directory_with_files_is_written_to(adapter: Path, tmp_path: Path) -> None:
    before = {file: file.read_bytes() for file in adapter.iterdir()}
    with pytest.raises(PolicyError, match="adapter is not empty; it is kept, so name another directory"):
        gp.delta.to_peft(tmp_path / "a", adapter)
    assert {file: file.read_bytes() for file in adapter.iterdir()} == before
    with pytest.raises(PolicyError, match="cannot be written"):
        gp.delta.to_peft(tmp_path / "a", tmp_path / "a")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"peft_type": "LORA"}, "peft_type in .*: unknown value 'LORA'; .*'SHIRA', 'TRAINABLE_TOKENS'"),
        ({"token_indices": [20]}, r"'a.weight' does not fit \[20, 4\]: .*out of"),
        ({"token_indices": [3, 4]}, "does not fit"),
        ({"token_indices": "3"}, "does not fit"),
        ({"token_indices": [3, 3, 3]}, "token_indices has an index 3 times"),
    ],
)
def test_adapters_of_another_kind_are_refused(values, message, adapter, tmp_path):
    config = adapter_of(adapter)[0]
    (adapter / "adapter_config.json").write_text(json.dumps({**config, **values}))
    with pytest.raises(PolicyError, match=message):
        gp.delta.from_peft(adapter, tmp_path / "b", {"a.weight": torch.zeros(20, 4)})


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("shira_weight", lambda each: each * torch.nan, "expected finite real numbers"),
        ("shira_weight", lambda each: each * 1j, "expected finite real numbers"),
        ("shira_indices", lambda each: each * 0, "shira_indices has an index .* times"),
        ("shira_indices", lambda each: each.float(), "does not fit"),
    ],
)
def test_damaged_tensors_of_an_adapter_are_refused(key, change, message, tmp_path: Path) -> None:
    base = {"a.weight": torch.zeros(20, 4)}
    model = {"a.weight": torch.zeros(20, 4).index_put((torch.arange(5), torch.tensor(1)), torch.ones(5))}
    exported(model, base, tmp_path)
    file = tmp_path / "adapter/adapter_model.safetensors"
    tensors = {name: change(each) if name.endswith(key) else each for name, each in load_file(file).items()}
    save_file({name: each.contiguous() for name, each in tensors.items()}, file)
    with pytest.raises(PolicyError, match=message):
        gp.delta.from_peft(tmp_path / "adapter", tmp_path / "b", base)


def test_other_bases_and_damaged_configs_are_refused(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"unknown tensor 'a\.weight'; did you mean 'a\.weights'"):
        gp.delta.from_peft(adapter, tmp_path / "b", {"a.weights": torch.zeros(20, 4)})
    for text, why in (("{", "JSONDecodeError"), ("[" * 100_000, "it is nested too deeply")):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(PolicyError, match=rf"adapter_config\.json cannot be read: {why}"):
            gp.delta.from_peft(adapter, tmp_path / "b")
    for text in ("null", "[1]"):
        (adapter / "adapter_config.json").write_text(text)
        with pytest.raises(PolicyError, match=r"peft_type in .*adapter_config\.json: unknown value 'None'"):
            gp.delta.from_peft(adapter, tmp_path / "b")
