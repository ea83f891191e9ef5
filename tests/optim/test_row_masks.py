"""Masks of rows: each row moves as torch's own optimizer would move it alone."""

import pytest
import torch

import gradpolicy as gp

SHAPES = [(400, 100), (400, 100)]
"""Their rows do not end where the stretches end that a kernel takes at once."""


@pytest.mark.parametrize("frozen_state", ["keep", "zero", "drop"])
@pytest.mark.parametrize("at_once", [True, False])
def test_rows_move_as_each_would_alone_while_their_masks_change(at_once, frozen_state):
    weights = [torch.nn.Parameter(torch.randn(shape)) for shape in SHAPES]
    rows = [[torch.nn.Parameter(row.clone()) for row in weight.detach()] for weight in weights]
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(weights, lr=0.01), frozen_state=frozen_state)
    alone = torch.optim.AdamW([row for own in rows for row in own], lr=0.01, foreach=True)
    for _ in range(4):
        masks = {weight: torch.rand(len(weight), 1) < 0.5 for weight in weights}
        if at_once:
            optimizer.set_masks(masks)
        else:
            for weight, mask in masks.items():
                optimizer.set_mask(weight, mask)
        for weight, own in zip(weights, rows, strict=True):
            weight.grad = torch.randn_like(weight)
            for row, gradient, active in zip(own, weight.grad, masks[weight], strict=True):
                row.grad = gradient.clone() if active else None
                if frozen_state != "keep" and not active:
                    alone.state.pop(row, None)
        optimizer.step()
        alone.step()
    for weight, own in zip(weights, rows, strict=True):
        torch.testing.assert_close(weight.detach(), torch.stack([row.detach() for row in own]))
