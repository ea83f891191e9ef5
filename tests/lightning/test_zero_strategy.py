"""An optimizer whose state is sharded shares its groups with the optimizer that it was made of."""

import warnings

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from process_pool import ProcessPool, here
from runs import fit
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer

from gradpolicy.lightning.zero_strategy import as_zero


def trained(loaded: bool) -> tuple[list[float], bool, list[str]]:
    """A few steps under a scheduler of the optimizer given, perhaps with a state loaded on the way.

    The learning rates, whether sharding again changes nothing, and what the scheduler complains of.
    """
    model = nn.Linear(2, 2).to(here())
    given = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    shared = as_zero(given)
    seen = []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(4):
            if loaded and step == 2:
                shared.consolidate_state_dict(0)
                saved = [shared.state_dict() if torch.distributed.get_rank() == 0 else None]
                torch.distributed.broadcast_object_list(saved)
                shared.load_state_dict(saved[0])
            model(torch.ones(1, 2, device=here())).sum().backward()
            shared.step()
            scheduler.step()
            seen.append(shared.optim.param_groups[0]["lr"])
    complaints = [str(each.message) for each in told if "step" in str(each.message)]
    return seen, as_zero(shared) is shared, complaints


@pytest.mark.parametrize("loaded", [False, True])
def test_a_scheduler_stays_in_force_and_has_nothing_to_complain_of(pair: ProcessPool, loaded: bool) -> None:
    assert pair(trained, loaded) == [([1.0, 0.5, 0.25, 0.125], True, [])] * 2


def kept_settings() -> tuple[str, float, list[float]]:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(here())
    groups = [{"params": layers[0].parameters(), "lr": 0.1}, {"params": layers[1].parameters()}]
    shared = as_zero(torch.optim.SGD(groups, lr=0.5, momentum=0.9))
    return type(shared.optim).__name__, shared.defaults["momentum"], [g["lr"] for g in shared.param_groups]


def test_settings_and_groups_stay(pair: ProcessPool) -> None:
    assert pair(kept_settings) == [("SGD", 0.9, [0.1, 0.5])] * 2


class Kinds(Callback):
    """Notes of what kind the optimizers of a run are."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.seen = [type(optimizer) for optimizer in trainer.optimizers]


def kinds_in_a_run() -> list[bool]:
    kinds = Kinds()
    fit("zero1", "none", settings={"callbacks": [kinds], "max_epochs": 1})
    return [kind is ZeroRedundancyOptimizer for kind in kinds.seen]


def test_the_strategy_shards_each_optimizer_of_a_run(pair: ProcessPool) -> None:
    assert pair(kinds_in_a_run) == [[True]] * 2
