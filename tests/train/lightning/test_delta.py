"""The changes of a run are saved by one call after it."""

from pathlib import Path

import pytest
import torch

import gradpolicy as gp


@pytest.mark.supports("delta", loop="lightning")
def test_the_file_leads_from_the_first_weights_to_the_last(two_layers, train, tmp_path: Path) -> None:
    base = {name: tensor.clone() for name, tensor in two_layers.state_dict().items()}
    names = list(base)
    train({"rows": gp.Freeze(gp.masks.Rows(":2"), params=names[0])}, max_steps=3)
    info = gp.delta.save(tmp_path / "run.delta", two_layers, base)
    assert {tensor.name: tensor.form for tensor in info.tensors}[names[0]] == "rows"
    gp.delta.apply(base, info.path)
    assert all(torch.equal(base[name], tensor) for name, tensor in two_layers.state_dict().items())
