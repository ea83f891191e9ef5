"""Two processes: the gradients are the mean of what one process gives with the same policies."""

import socket
import sys
from pathlib import Path

import pytest
import torch
import torch.multiprocessing

sys.path.insert(0, str(Path(__file__).parent))
import distributed_steps


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp before", "ddp after", "fsdp before", "fsdp after"])
def test_the_gradients_are_the_mean_over_the_ranks(kind, tmp_path):
    result = tmp_path / "gradients.pt"
    torch.multiprocessing.spawn(distributed_steps.run, (2, free_port(), kind, str(result)), nprocs=2)
    found, expected = torch.load(result), distributed_steps.expected(2)
    assert found.keys() == expected.keys()
    assert expected["stem.weight"].any()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient)


def test_a_parameter_sharded_after_its_policy_was_installed_is_refused(tmp_path):
    """One process is enough to shard."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    import gradpolicy as gp

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model = distributed_steps.make_model()
        with gp.install(model, [gp.Scale(2.0, params="first.weight")]):
            fully_shard(model)
            with pytest.raises(gp.PolicyError, match="sharded"):
                model(distributed_steps.batch_of(0))
        fully_shard(model := distributed_steps.make_model())
        with pytest.raises(gp.PolicyError, match="sharded"):
            gp.install(model, [gp.Scale(2.0, params="first.weight")])
    finally:
        dist.destroy_process_group()
