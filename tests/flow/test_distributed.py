"""Two processes: the gradients are the mean of what one process gives with the same policies."""

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing
from torch.distributed.fsdp import fully_shard

import gradpolicy as gp
from tests.flow import distributed_steps

IN_THE_TABLE = {"ddp before": "ddp", "ddp after": "ddp", "fsdp before": "fsdp2", "fsdp after": "fsdp2"}


@pytest.mark.supports("flow", loop="plain", processes="{kind}", names=IN_THE_TABLE)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["ddp before", "ddp after", "fsdp before", "fsdp after"])
def test_the_gradients_are_the_mean_over_the_ranks(kind, tmp_path):
    torch.multiprocessing.spawn(distributed_steps.run, (2, kind, str(tmp_path)), nprocs=2)
    found, expected = torch.load(tmp_path / "gradients.pt"), distributed_steps.expected(2)
    assert expected["stem.weight"].any()
    torch.testing.assert_close(found, expected)


@pytest.fixture
def one_process(tmp_path):
    """One process is enough to shard."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("sharded_first", [False, True])
def test_rules_on_sharded_parameters(one_process, sharded_first):
    expected = distributed_steps.expected(1)
    model = distributed_steps.make_model()
    if sharded_first:
        distributed_steps.shard(model)
    with gp.install(model, distributed_steps.POLICIES):
        if not sharded_first:
            distributed_steps.shard(model)
        for _ in range(2):
            found = distributed_steps.gradients(model, 0)
            for name, gradient in found.items():
                torch.testing.assert_close(gradient.full_tensor(), expected[name])
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in model.parameters())


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, x):
        self.embed.unshard()
        return torch.nn.functional.linear(self.head(x), self.embed.weight)


@pytest.mark.parametrize("sharded_first", [False, True])
def test_sharded_parameter_outside_its_module_is_refused(one_process, sharded_first):
    model, policies = Tied(), [gp.Scale(2.0, params="embed.weight")]
    installed = None if sharded_first else gp.install(model, policies)
    fully_shard(model.embed)
    fully_shard(model)
    installed = installed or gp.install(model, policies)
    loss = model(distributed_steps.batch_of(0)).sum()
    with pytest.raises(gp.PolicyError, match=r"'embed.weight' is sharded and was used while"):
        loss.backward()
    installed.remove()
