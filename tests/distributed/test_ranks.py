"""The callback on two ranks: agreement, the reducer, traffic."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from process_pool import ProcessPool, here, refusal
from runs import UPDATES, Network, check_equal, fit
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils.flop_counter import FlopCounterMode

import gradpolicy as gp
from gradpolicy.freezing import Freezer
from gradpolicy.train.ranks import Ranks

FAULT_AT, EVERY = 2, 4


def _count_once_more(masked):
    masked.ages.count()


class Fault(Callback):
    """Changes something on rank 1 alone, behind everybody's back."""

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step != FAULT_AT or dist.get_rank() != 1:
            return
        weight = pl_module.layers[1][0].weight
        optimizer = trainer.strategy.optimizers[0]
        if self.kind == "rate":
            optimizer.param_groups[0]["lr"] *= 1.01
        elif self.kind == "age":
            _count_once_more(optimizer.masked[weight])
        elif self.kind == "mask":
            mask = optimizer.get_mask(weight).clone()
            mask[0, 0] = ~mask[0, 0]
            optimizer.set_mask(weight, mask)
        else:
            weight.data[3, 3] += 1e-6


def with_fault(kind: str, every: int | None, strategy: str = "ddp") -> str:
    settings = {"callbacks": [Fault(kind)]}
    return refusal(fit, strategy, "entries", settings=settings, callback={"agreement_every": every})


@pytest.mark.supports("agreement", loop="lightning", processes="{strategy}")
@pytest.mark.parametrize(
    ("strategy", "kind", "named"),
    [
        # Masks are drawn anew before ranks are compared; ages remember.
        ("ddp", "mask", "the ages of 'layers.1.0.weight'"),
        ("ddp", "age", "the ages of 'layers.1.0.weight'"),
        ("ddp", "weight", "the weights 'layers.1.0.weight'"),
        ("ddp", "rate", "the learning rates"),
        ("fsdp2", "rate", "the learning rates"),
    ],
)
def test_a_rank_that_parts_ways_stops_the_run_within_n_updates(
    pair: ProcessPool, strategy: str, kind: str, named: str
) -> None:
    for message in pair(with_fault, kind, EVERY, strategy):
        assert f"before update {EVERY + 1}: {named} differs on rank 1" in message


def layers_by_a_plan() -> list[str]:
    """The layers that a source counts where only the first rank has a plan."""
    source = gp.masks.Gradual()

    def plan(module: LightningModule) -> None:
        if dist.get_rank() == 0:
            run.idle = ("layers.1.0.weight", "layers.1.0.bias", "probe.weight", "probe.bias")

    guard = gp.GradientPolicies({"trunk": gp.Freeze(source)})
    run = guard.run
    fit("ddp", "none", prepare=plan, settings={"callbacks": [guard], "max_steps": 1})
    return [layer.name for layer in source.layer_groups]


def test_the_plan_of_the_first_rank_holds_on_all(pair: ProcessPool) -> None:
    assert pair(layers_by_a_plan) == [["layers.0", "layers.2", "layers.3", "head"]] * 2


def hybrid_with_fault(kind: str) -> str:
    """Two copies of the model, each sharded over two ranks; something changes on rank 3 alone."""
    mesh = init_device_mesh(here().type, (2, 2), mesh_dim_names=("copies", "shards"))
    torch.manual_seed(0)
    model = fully_shard(nn.Linear(6, 6).to(here()), mesh=mesh)
    optimizer = gp.MaskedOptimizer(torch.optim.AdamW(model.parameters()))
    optimizer.set_mask(model.weight, torch.arange(36, device=here()).view(6, 6) % 3 > 0)
    named = dict(model.named_parameters())
    ranks = Ranks(model, named, Freezer(model, [optimizer], {}), [optimizer], agreement_every=1)
    ranks.begin_step(0)
    model(torch.ones(1, 6, device=here())).sum().backward()
    optimizer.step()
    if dist.get_rank() == 3:
        if kind == "weight":
            model.weight.to_local().data[0, 0] += 1e-6
        elif kind == "mask":
            masked = optimizer.masked[model.weight]
            masked.ages = masked.ages.turned(~masked.ages.mask)
        elif kind == "age":
            _count_once_more(optimizer.masked[model.weight])
    return refusal(ranks.begin_step, 1)


@pytest.mark.supports("agreement", loop="plain", processes="fsdp2")
@pytest.mark.parametrize(
    ("kind", "named"),
    [
        ("weight", "the weights 'weight'"),
        ("mask", "the mask of 'weight'"),
        ("age", "the ages of 'weight'"),
        ("nothing", ""),
    ],
)
def test_copies_of_a_shard_are_compared(pools: dict[int, ProcessPool], kind: str, named: str) -> None:
    messages = pools[4](hybrid_with_fault, kind)
    assert messages[0] == messages[2] == ""
    for message in (messages[1], messages[3]):
        assert named in message
        assert ("differs on rank 3" in message) == (kind != "nothing")


def remembering() -> str:
    """A mask source gathers another gradient on rank 1; nothing else differs so far."""
    torch.manual_seed(0)
    model = nn.Linear(4, 4).to(here())
    optimizer = gp.MaskedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    policies = {"top": gp.Freeze(gp.masks.TopK(0.5, window=3, every=3))}
    freezer = Freezer(model, [optimizer], policies)
    ranks = Ranks(model, dict(model.named_parameters()), freezer, [optimizer], agreement_every=1)
    ranks.begin_step(0)
    freezer.begin_step(0)
    model(torch.full((1, 4), 1.0 + dist.get_rank(), device=here())).sum().backward()
    freezer.observe(freezer.optimizers[0])
    return refusal(ranks.begin_step, 1)


def test_what_a_mask_source_remembers_is_compared(pair: ProcessPool) -> None:
    for message in pair(remembering):
        assert "what policy 'top' remembers as" in message
        assert "differs on rank 1" in message


def test_without_a_check_nothing_is_compared(pair: ProcessPool) -> None:
    assert pair(with_fault, "weight", None) == ["", ""]


def test_the_reducer_is_rebuilt_only_when_what_trains_changes(pair: ProcessPool) -> None:
    layers, entries = pair(fit, "ddp", "layers")[0], pair(fit, "ddp", "entries")[0]
    assert layers["rebuilds"] == [1, 1, 1, 2, 2, 2, 3, 3], "new layers every third update"
    assert entries["rebuilds"] == [0] * UPDATES, "no tensor is frozen as a whole"


def test_unused_parameters_are_searched_for_while_a_cut_holds_only(pair: ProcessPool) -> None:
    assert pair(fit, "ddp", "cut off")[0]["searched"] == [False] * 2 + [True] * 3 + [False] * 3
    assert not any(pair(fit, "ddp", "layers")[0]["searched"])


class CountBackward(Callback):
    """Counts the floating-point operations of each backward pass."""

    def __init__(self) -> None:
        self.operations: list[int] = []

    def on_before_backward(self, trainer: Trainer, pl_module: LightningModule, loss: torch.Tensor) -> None:
        self.counter = FlopCounterMode(display=False)
        self.counter.__enter__()

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counter.__exit__(None, None, None)
        self.operations.append(self.counter.get_total_flops())


def backward_work(strategy: str, kind: str) -> list[int]:
    counted = CountBackward()
    fit(strategy, kind, settings={"callbacks": [counted]})
    return counted.operations


@pytest.mark.parametrize("kind", ["layers", "from the start"])
def test_frozen_layers_save_their_backward_work_as_on_one_process(pair: ProcessPool, kind: str) -> None:
    alone, everything = backward_work("one process", kind), backward_work("one process", "none")
    assert min(alone) < 0.6 * min(everything), "layers at the bottom are frozen at some time"
    for rank in pair(backward_work, "ddp", kind):
        shares = [2 * own / whole for own, whole in zip(rank, alone, strict=True)]
        assert all(0.9 <= share <= 1.1 for share in shares), "each of two ranks has half of the batch"


def frozen_by_hand(strategy: str) -> dict[str, Any]:
    return fit(strategy, "none", prepare=freeze_first_layer, settings={"callbacks": [Thaw()]})


def freeze_first_layer(module: LightningModule) -> None:
    module.layers[0].requires_grad_(False)


class Thaw(Callback):
    """What a finetuning callback does: lets the frozen layer train from the third update on."""

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == 2:
            pl_module.layers[0].requires_grad_(True)


def test_what_was_frozen_before_wrapping_is_reduced_once_it_thaws(pair: ProcessPool) -> None:
    check_equal(pair(frozen_by_hand, "ddp"), frozen_by_hand("one process"))


def zero(module: nn.Module) -> ZeroRedundancyOptimizer:
    return ZeroRedundancyOptimizer(module.parameters(), torch.optim.AdamW, lr=0.01)


def use_zero(module: LightningModule) -> None:
    module.configure_optimizers = lambda: zero(module)  # type: ignore[method-assign]


def said_to_zero() -> list[str]:
    """What MaskedOptimizer, a plain loop and Lightning say to torch's ZeroRedundancyOptimizer."""
    module = Network()
    half = [gp.Freeze(gp.masks.Random(0.5))]
    return [
        refusal(gp.MaskedOptimizer, zero(module)),
        refusal(gp.training(module, zero(module), half).__enter__),
        refusal(fit, "ddp", "entries", prepare=use_zero),
    ]


def test_zero_redundancy_optimizer_is_refused_in_favour_of_fsdp2(pair: ProcessPool) -> None:
    for said in pair(said_to_zero):
        assert all("ZeroRedundancyOptimizer is refused; FSDP2" in line for line in said)
