"""Bytes of the optimizer in a checkpoint, against those of AdamW on all parameters."""

import functools
import io
from collections.abc import Callable

import torch
from torch import nn

import gradpolicy as gp
from benchmarks.measure import Row

SHAPE = {"num_hidden_layers": 6, "hidden_size": 384, "intermediate_size": 1536, "num_attention_heads": 12}
"""22.7 M parameters with BERT's vocabulary."""


def network() -> nn.Module:
    """A BERT of MiniLM's shape, with random weights."""
    from transformers.models.bert import BertConfig, BertModel

    torch.manual_seed(0)
    model: nn.Module = BertModel(BertConfig(**SHAPE))
    return model


def bytes_of(model: nn.Module, *policies: gp.Freeze) -> int:
    """The size of a file with the optimizer's state and its masks."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    tokens = torch.randint(0, 30_000, (2, 16))
    with gp.training(model, torch.optim.AdamW(wanted, fused=True), list(policies)) as optimizer:
        for _ in range(3):
            model(input_ids=tokens).last_hidden_state.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        file = io.BytesIO()
        torch.save(optimizer.state_dict(), file)
    return file.tell()


def biases_alone() -> nn.Module:
    """The network with `requires_grad` set by hand."""
    model = network()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def with_lora() -> nn.Module:
    """The network with adapters of rank 8 on all its linear layers."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(network(), LoraConfig(r=8, target_modules="all-linear"))


def checkpoint_bytes() -> list[Row]:
    """What each way saves, as a share of what AdamW saves of all parameters."""
    dropping = functools.partial(gp.Freeze, frozen_state="drop")
    saved = {
        "BitFit, by hand": bytes_of(biases_alone()),
        "BitFit": bytes_of(network(), dropping(gp.masks.Fixed(["*.bias"]))),
        "LoRA, rank 8, all linear layers": bytes_of(with_lora()),
        **{
            f"TopK, {share:.1%}": bytes_of(network(), dropping(gp.masks.TopK(share, by="gradient", window=1)))
            for share in (0.1, 0.01, 0.001)
        },
    }
    full = bytes_of(network())
    return [
        {"what": f"{what}: {count / 1e6:.2f} of {full / 1e6:.1f} MB", "ratio": count / full, "unit": "bytes"}
        for what, count in saved.items()
    ]


BENCHMARKS: dict[str, Callable[[], list[Row]]] = {"checkpoint_bytes": checkpoint_bytes}
