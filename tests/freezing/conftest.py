"""What the tests of the engine share."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import nn

import gradpolicy as gp
from gradpolicy.freezing import Freezer


class FakeOptimizer:
    """Records the masks that it gets."""

    def __init__(self, parameters) -> None:
        self.param_groups = [{"params": list(parameters)}]
        self.masks, self.effective_steps = {}, 0

    def set_masks(self, masks, **settings) -> None:
        self.masks |= masks

    def full_parameters(self, *, values) -> AbstractContextManager:
        """They always are."""
        return nullcontext()

    def set_settings(self, settings) -> None:
        """No policy here sets any."""
        assert not settings


def masked(model: nn.Module, **settings) -> gp.MaskedOptimizer:
    return gp.MaskedOptimizer(torch.optim.AdamW(model.parameters(), lr=0.05), **settings)


def freezer_of(model: nn.Module, policies, **settings) -> tuple[gp.MaskedOptimizer, Freezer]:
    """AdamW on the whole model, and these policies on it; settings as the freezer's."""
    optimizer = masked(model)
    return optimizer, Freezer(model, [optimizer], policies, **settings)


def loss_of(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).square().mean()


def train(model: nn.Module, freezer: Freezer, tokens: torch.Tensor, steps: range) -> None:
    """Take effective steps; an epoch has four."""
    for step in steps:
        freezer.begin_step(step, epoch=step // 4)
        model.zero_grad()
        loss_of(model, tokens).backward()
        for optimizer in freezer.optimizers:
            freezer.observe(optimizer)
            optimizer.step()
