"""A small BERT made from a config, its data, and its training under Lightning."""

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

import gradpolicy as gp

VOCABULARY = 40


def make_bert(**settings: Any) -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=16,
        num_labels=2,
        **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **settings},
    )
    return BertForSequenceClassification(config)


def make_data(vocabulary: int = VOCABULARY, samples: int = 24, length: int = 6) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(vocabulary - 8, vocabulary, (samples, length), generator=generator)
    return [{"input_ids": row, "labels": row.sum() % 2} for row in tokens]


class Wrapped(LightningModule):
    """A transformers model under its own names, for Lightning."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        for name, child in model.named_children():
            self.add_module(name, child)
        self.whole = [model]

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.whole[0](**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2, weight_decay=0.0, fused=True)


def train_with_lightning(
    model: torch.nn.Module, policies: dict[str, Any], folder: Path, data: list | None = None, **settings: Any
) -> gp.GradientPolicies:
    callback = gp.GradientPolicies(policies)
    trainer = Trainer(
        accelerator="cpu",
        max_epochs=2,
        gradient_clip_val=0.05,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
        callbacks=[callback],
        **settings,
    )
    trainer.fit(Wrapped(model), DataLoader(data or make_data(), batch_size=4))
    return callback
