"""Buffers that go on changing in a frozen layer are found by module."""

import torch
from torch import nn

from gradpolicy.freezing.moving_buffers import buffer_warnings, changed_buffers, copy_buffers


def test_a_training_step_of_a_batch_norm_changes_its_statistics():
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    before = copy_buffers(model)
    assert changed_buffers(before, model) == {}
    model(torch.randn(4, 2))
    assert changed_buffers(before, model) == {"1": ["running_mean", "running_var", "num_batches_tracked"]}


def test_only_a_layer_that_is_frozen_as_a_whole_is_named():
    changed = {"norm": ["running_mean"]}
    parameters = ["norm.weight", "norm.bias", "head.weight"]
    assert not list(buffer_warnings({"half": {"norm.weight"}}, changed, parameters))
    (line,) = buffer_warnings({"all": {"norm.weight", "norm.bias"}}, changed, parameters)
    assert line.startswith("all: freezing stops parameters, not buffers: norm goes on changing running_mean")
