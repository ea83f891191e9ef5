"""`gradpolicy checkpoint dense`: optimizers for programs that know torch alone."""

import torch

import gradpolicy as gp
from gradpolicy.commands.cli import main


def test_a_small_checkpoint_becomes_one_that_torch_alone_steps_from(tmp_path, refusal):
    generator = torch.Generator().manual_seed(0)
    weight = torch.nn.Parameter(torch.randn(40, 30, generator=generator))
    still = torch.nn.Parameter(torch.ones(5))
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW([weight, still]), frozen_state="drop")
    optimizer.set_masks({weight: torch.rand(40, 30, generator=generator) < 0.1, still: False})
    for _ in range(2):
        weight.grad, still.grad = torch.ones(40, 30), torch.ones(5)
        optimizer.step()
    small, dense = tmp_path / "small.pt", tmp_path / "dense.pt"
    torch.save({"epoch": 1, "optimizer_states": [optimizer.state_dict()]}, small)
    assert main(["checkpoint", "dense", str(small), "--out", str(dense)]) == 0
    content = torch.load(dense, weights_only=True)
    assert content["epoch"] == 1
    (state,) = content["optimizer_states"]
    wanted = optimizer.state_dict(dense=True)["state"][0]
    assert all(torch.equal(state["state"][0][key], wanted[key]) for key in wanted)
    plain = torch.optim.AdamW([weight, still])
    plain.load_state_dict(state)
    plain.step()
    assert weight.isfinite().all()
    assert "is there already" in refusal("checkpoint", "dense", str(small), "--out", str(dense))
