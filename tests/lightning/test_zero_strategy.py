"""An optimizer whose state is sharded shares its groups with the optimizer that it was made of."""

import torch
from process_pool import ProcessPool, here
from torch import nn

from gradpolicy.lightning.zero_strategy import as_zero


def rates(loaded: bool) -> list[float]:
    """Learning rates under a scheduler of the optimizer given, perhaps with a state loaded on the way."""
    model = nn.Linear(2, 2).to(here())
    given = torch.optim.AdamW(model.parameters(), lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(given, 0.5)
    shared = as_zero(given)
    seen = []
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
    return seen


def test_a_scheduler_stays_in_force_also_after_a_state_was_loaded(pair: ProcessPool) -> None:
    for loaded in (False, True):
        assert pair(rates, loaded) == [[1.0, 0.5, 0.25, 0.125]] * 2


def kept_settings() -> tuple[str, float, list[float]]:
    layers = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).to(here())
    groups = [{"params": layers[0].parameters(), "lr": 0.1}, {"params": layers[1].parameters()}]
    shared = as_zero(torch.optim.SGD(groups, lr=0.5, momentum=0.9))
    return type(shared.optim).__name__, shared.defaults["momentum"], [g["lr"] for g in shared.param_groups]


def test_settings_and_groups_stay(pair: ProcessPool) -> None:
    assert pair(kept_settings) == [("SGD", 0.9, [0.1, 0.5])] * 2
