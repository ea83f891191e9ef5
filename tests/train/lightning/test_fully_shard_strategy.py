"""Which modules are gathered as one, and what a run saves and goes on from."""

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from loops import all_ranks
from process_pool import ProcessPool, here, refusal
from runs import fit
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from gradpolicy.train.lightning.fully_shard_strategy import shard_modules


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(2))
        self.head = nn.Linear(4, 1)


def gathered(patterns: tuple[str, ...]) -> list[str]:
    """The names of the modules that were made units, after sharding twice."""
    model = Network().to(here())
    for _ in range(2):
        shard_modules(model, all_ranks(), patterns)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


@pytest.mark.parametrize(
    ("patterns", "units"),
    [
        ((), ["", "blocks.0", "blocks.0.0", "blocks.1", "blocks.1.0"]),
        (("head",), ["", "head"]),
        (("blocks.?",), ["", "blocks.0", "blocks.1"]),
    ],
)
def test_the_chosen_modules_and_the_root_are_gathered_one_by_one(
    pair: ProcessPool, patterns: tuple[str, ...], units: list[str]
) -> None:
    assert pair(gathered, patterns) == [units, units]


def refused() -> str:
    return refusal(shard_modules, Network(), all_ranks(), ("haed",))


def test_a_pattern_that_matches_nothing_is_refused(pair: ProcessPool) -> None:
    assert all("'haed'" in message and "head" in message for message in pair(refused))


class Sharding(Callback):
    """Notes the units of a run, and whether the module has kept a hook that it did not have."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.units = [name for name, module in pl_module.named_modules() if isinstance(module, FSDPModule)]
        self.hooked = "configure_model" in vars(pl_module)


def shard_it_oneself(module: LightningModule) -> None:
    """Gives a module the hook by which it shards itself, in another way than the strategy would."""

    class OfItself(type(module)):  # type: ignore[misc]
        def configure_model(self) -> None:
            shard_modules(self, self.device_mesh["data_parallel"], ("head",))

    module.__class__ = OfItself


def sharded_runs(folder: str) -> dict[str, Any]:
    """Runs of two epochs: left alone, sharded by the module itself, and resumed after the first epoch."""
    ours, own = Sharding(), Sharding()
    found = {
        "alone": fit("fsdp2", "entries", settings={"callbacks": [ours]}),
        "by itself": fit("fsdp2", "entries", settings={"callbacks": [own]}, prepare=shard_it_oneself),
    }
    fit("fsdp2", "entries", settings={"max_epochs": 1}, save_to=f"{folder}/sharded.ckpt")
    for name in ("sharded", "one"):
        found[name] = fit("fsdp2", "entries", resume_from=f"{folder}/{name}.ckpt")
    return {**found, "units": (ours.units, own.units), "hooked": ours.hooked}


def test_a_run_goes_on_from_what_it_or_one_process_has_saved(pair: ProcessPool, tmp_path: Path) -> None:
    fit("one process", "entries", settings={"max_epochs": 1}, save_to=str(tmp_path / "one.ckpt"))
    for found in pair(sharded_runs, str(tmp_path)):
        layers = [f"layers.{number}" for number in range(4)]
        within = [f"{layer}.0" for layer in layers]
        ours, own = found["units"]
        assert ours == ["", *(name for pair in zip(layers, within, strict=True) for name in pair)]
        assert own == ["", "head"]
        assert not found["hooked"]
        alone = found["alone"]
        for name in ("by itself", "sharded", "one"):
            torch.testing.assert_close(found[name]["weights"], alone["weights"])
            for kind in ("masks", "ages"):
                assert all(torch.equal(found[name][kind][key], alone[kind][key]) for key in alone[kind])
