"""The functions that the processes of test_distributed.py run."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import gradpolicy as gp

POLICIES = {
    "rounding": gp.StraightThrough("tanh"),
    "guide": gp.Guided(),
    "slow": gp.Scale(0.5, modules="*first"),
    "through": gp.UseRule("hardtanh", modules="*middle", at="through", inside="own"),
    "cut": gp.Stop("zero", modules="*last"),
    "turned": gp.Reverse(0.5, params="*last.weight"),
    "bound": gp.Clip(norm=0.01, params=["*first.weight", "*stem.weight"]),
    "still": gp.Stop("zero", params="*first.bias"),
}


def make_model():
    torch.manual_seed(0)
    return Network()


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.middle = nn.Linear(4, 4)

    def forward(self, x):
        x = self.middle(x) + x
        x = torch.round(2 * self.first(F.relu(self.stem(x))))
        return self.last(x) + torch.relu(x)


def batch_of(rank):
    return torch.randn(6, 4, generator=torch.Generator().manual_seed(rank))


def gradients(model, rank):
    """The gradients of a rank's batch."""
    model.zero_grad(set_to_none=True)
    model(batch_of(rank)).square().mean().backward()
    return {name.removeprefix("module."): p.grad for name, p in model.named_parameters()}


def shard(model):
    fully_shard(model.first)
    fully_shard(model)


def expected(world):
    """The mean of the ranks' gradients, in one process: each rank's rules act before the mean is taken."""
    model = make_model()
    with gp.install(model, POLICIES):
        of_ranks = [gradients(model, rank) for rank in range(world)]
    return {name: sum(each[name] for each in of_ranks) / world for name in of_ranks[0]}


def run(rank, world, kind, folder):
    """Take two backward passes on a rank; rank 0 saves the second's gradients."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    wrapped = model = make_model()
    installed = gp.install(model, POLICIES) if kind.endswith("before") else None
    if kind.startswith("ddp"):
        wrapped = nn.parallel.DistributedDataParallel(model)
    else:
        shard(model)
    if installed is None:
        installed = gp.install(wrapped, POLICIES)
    gradients(wrapped, rank)
    found = gradients(wrapped, rank)
    whole = {name: one.full_tensor() if hasattr(one, "full_tensor") else one for name, one in found.items()}
    if rank == 0:
        torch.save(whole, f"{folder}/gradients.pt")
    installed.remove()
    assert not any(p._backward_hooks or p._post_accumulate_grad_hooks for p in wrapped.parameters())
    dist.destroy_process_group()
