"""Warnings of buffers that change, and of dropout, in frozen modules."""

import torch
from torch import nn

from gradpolicy.freezing.moving_parts import copy_buffers, moving_parts, moving_warnings


def test_warns_about_running_stats_and_dropout_unless_buffers_eval():
    norm = nn.Sequential(nn.BatchNorm1d(2), nn.Dropout(0.1))
    model = nn.ModuleDict({"norm": norm, "head": nn.Linear(2, 1)})
    before = copy_buffers(model)
    model["norm"](torch.randn(4, 2))
    moving = moving_parts(before, model)
    parameters = [name for name, _ in model.named_parameters()]

    def lines(frozen, buffers):
        return list(moving_warnings({"own": frozen}, moving, parameters, {"own": buffers}))

    assert not lines({"norm.0.weight"}, "move")
    every = {"norm.0.weight", "norm.0.bias"}
    (line,) = lines(every, "move")
    assert line.startswith(
        "own: freezing stops parameters, not buffers, not dropout: norm.0, norm.1 go on changing "
        "running_mean, running_var, num_batches_tracked and drawing dropout while frozen; with buffers: eval"
    )
    assert lines(every, "eval") == []
