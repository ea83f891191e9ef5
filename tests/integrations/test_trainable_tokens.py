"""Rows of embeddings that train: what peft's own tests of trainable tokens state, stated for masks of rows.

Merging, switching off and stacking adapters have no counterpart: the rows train in the weights themselves.
"""

import copy
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, TrainableTokensConfig, get_peft_model
from sharded import make_llama
from torch import Tensor, nn

import gradpolicy as gp

TOKENS, ROWS, KEPT = torch.tensor([[0, 1, 2, 3, 4]]), [0, 1, 3], [2, 4]


def only_rows(rows: list[int], embedding: str = "model.embed_tokens.weight") -> dict[str, gp.Freeze]:
    """Policies by which these rows train, and nothing else."""
    return {
        "tokens": gp.Freeze(gp.masks.Rows(rows=rows), params=embedding, frozen_state="drop"),
        "rest": gp.Freeze(gp.masks.Fixed(), params=["*", f"!{embedding}"]),
    }


def train(model: nn.Module, policies: dict[str, gp.Freeze], lr: float = 0.1, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    with gp.training(model, optimizer, policies) as optimizer:
        for _ in range(steps):
            model(input_ids=TOKENS, labels=TOKENS).loss.backward()
            optimizer.step()
            optimizer.zero_grad()


def trained(policies: dict[str, gp.Freeze], **settings: bool) -> tuple[nn.Module, nn.Module]:
    """A Llama, and what training makes of it."""
    original = make_llama(**settings)
    model = copy.deepcopy(original)
    train(model, policies)
    return original, model


def moved_rows(before: Tensor, after: Tensor) -> list[int]:
    return (after != before).any(dim=1).nonzero().flatten().tolist()


def embedded(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(input_ids=TOKENS, output_hidden_states=True).hidden_states[0][0]


def test_the_rows_change_and_nothing_else_does_also_after_saving_and_loading(tmp_path: Path) -> None:
    original, model = trained(only_rows(ROWS), tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert torch.equal(embedded(loaded), embedded(model))
    assert not (embedded(loaded)[ROWS] == embedded(original)[ROWS]).any()
    assert torch.equal(embedded(loaded)[KEPT], embedded(original)[KEPT])
    others = [name for name, _ in original.named_parameters() if name != "model.embed_tokens.weight"]
    assert all(torch.equal(loaded.get_parameter(name), original.get_parameter(name)) for name in others)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("rows", [ROWS, [0, 10]])
def test_the_rows_become_what_peft_makes_of_them(rows: list[int], tied: bool) -> None:
    """Of a tied head peft trains the same rows, too."""
    model, adapted = (make_llama(tie_word_embeddings=tied) for _ in range(2))
    train(model, only_rows(rows), lr=0.01)
    config = TrainableTokensConfig(target_modules=["embed_tokens"], token_indices=rows)
    adapted = get_peft_model(adapted, config)
    trained = [parameter for parameter in adapted.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    for _ in range(3):
        adapted(input_ids=TOKENS, labels=TOKENS).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    merged = adapted.merge_and_unload()
    torch.testing.assert_close(model.state_dict(), merged.state_dict(), rtol=0.0, atol=1e-6)


def test_rows_train_beside_adapters() -> None:
    """As with LoraConfig(trainable_token_indices=...), where the embedding is otherwise frozen."""
    original = make_llama()
    model = get_peft_model(copy.deepcopy(original), LoraConfig(target_modules="all-linear", r=2))
    embedding = model.get_parameter("base_model.model.model.embed_tokens.weight").requires_grad_()
    rows = gp.Freeze(gp.masks.Rows(rows=ROWS), params="*embed_tokens.weight", frozen_state="drop")
    train(model, {"tokens": rows})
    assert moved_rows(original.model.embed_tokens.weight, embedding) == ROWS
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            assert parameter.any(), name
        elif "lora_" not in name and parameter is not embedding:
            own = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(parameter, original.get_parameter(own)), name
