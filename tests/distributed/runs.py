"""Lightning runs that tests start on one process and on several, and what is known of them afterwards."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy
from loops import whole
from process_pool import here
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import gradpolicy as gp
from gradpolicy.policies import Policy
from gradpolicy.train.lightning.checkpoints import AtomicCheckpointIO
from gradpolicy.train.lightning.fully_shard_strategy import FullyShardStrategy
from gradpolicy.where import plain_name

# A run takes two epochs, of half the updates each.
BATCH, UPDATES = 8, 8
STRATEGIES: dict[str, Callable[[], Any]] = {
    "one process": lambda: "auto",
    "ddp": lambda: DDPStrategy(process_group_backend=dist.get_backend()),
    "fsdp2": FullyShardStrategy,
}


class Network(LightningModule):
    """Four layers in a row, a head, and a probe beside it; a rounding in the middle."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(11)
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(10, 10), nn.ReLU()) for _ in range(4)))
        self.head = nn.Linear(10, 3)
        self.probe = nn.Linear(10, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        features = self.layers(batch[0])
        rounded = torch.round(features * 8) / 8
        target = batch[1]
        loss = nn.functional.mse_loss(self.head(rounded), target) + 0.1 * features.square().mean()
        probe_loss = nn.functional.mse_loss(self.probe(features), target)
        self.log("train/loss", loss)
        return loss + probe_loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.1)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {
                "scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
                "interval": "step",
            },
        }


def policies(kind: str, frozen_state: str) -> dict[str, Policy]:
    """Policies for a run by a short name."""
    trunk: dict[str, Any] = {"params": "layers.*", "frozen_state": frozen_state}
    made: dict[str, Callable[[], dict[str, Any]]] = {
        "none": dict,
        "layers": lambda: {"trunk": gp.Freeze(gp.masks.Layerwise(active=2, every=3), **trunk)},
        "tensors": lambda: {"trunk": gp.Freeze(gp.masks.Random(0.5, level="tensor", every=2), **trunk)},
        "rows": lambda: {"trunk": gp.Freeze(gp.masks.Random(0.5, level="row", every=2), **trunk)},
        "entries": lambda: {"trunk": gp.Freeze(gp.masks.Random(0.3, every=3), **trunk)},
        "from the start": lambda: {
            "trunk": gp.Freeze(gp.masks.Fixed(), **trunk, when=gp.When(start=0, stop=4))
        },
        "stop": lambda: {"cut": gp.Stop(modules="probe")},
        "cut off": lambda: {"cut": gp.Stop(modules=["head", "probe"], when=gp.When(start=2, stop=5))},
        "straight through": lambda: {"quantizer": gp.StraightThrough(ops=["round"])},
        "all kinds": lambda: {
            "cut": gp.Stop(modules="probe"),
            "quantizer": gp.StraightThrough(ops=["round"]),
            "trunk": gp.Freeze(gp.masks.Random(0.3, every=3), **trunk),
        },
        "gradient sources": lambda: {
            "trunk": gp.Freeze(gp.masks.TopK(0.4, every=3, before="freeze"), **trunk),
        },
        "rates": lambda: {"rates": gp.Rates({"layers.*": 0.3, "*.bias": {"weight_decay": 0.0}})},
        "phases": lambda: {
            "trunk": gp.Freeze(
                gp.masks.Phases(
                    [{"params": ["head.*", "probe.*"], "until": {"epochs": 1}, "lr": 0.05}, {"params": "*"}]
                ),
                frozen_state=frozen_state,
            )
        },
    }
    return made[kind]()


class Watch(Callback):
    """Keeps the optimizer, and counts what the run did."""

    def __init__(self) -> None:
        self.rebuilds: list[int] = []
        self.searched: list[bool] = []
        self.losses: list[float] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        ranks = next(c for c in trainer.callbacks if isinstance(c, gp.GradientPolicies)).run.ranks
        if ranks is not None and ranks.reducer is not None:
            self.rebuilds.append(ranks.reducer.rebuilds)
            self.searched.append(ranks.reducer.model.find_unused_parameters)
        self.losses.append(float(outputs["loss"].detach()))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.optimizer = trainer.strategy.optimizers[0]


def data(ranks: int) -> DataLoader:
    """Batches of which all ranks together hold what one process would."""
    generator = torch.Generator().manual_seed(4)
    samples = TensorDataset(torch.randn(32, 10, generator=generator), torch.randn(32, 3, generator=generator))
    rank = dist.get_rank() if ranks > 1 else 0
    sampler: DistributedSampler = DistributedSampler(samples, ranks, rank, shuffle=False)
    return DataLoader(samples, batch_size=BATCH // ranks, sampler=sampler)


def fit(
    strategy: str,
    kind: str,
    frozen_state: str = "keep",
    precision: str = "32-true",
    settings: dict[str, Any] | None = None,
    callback: dict[str, Any] | None = None,
    prepare: Callable[[LightningModule], None] | None = None,
    resume_from: str | None = None,
    save_to: str | None = None,
) -> dict[str, Any]:
    """Trains and tells: weights, masks and ages by name, the losses, what the reducer did."""
    warnings.simplefilter("ignore")
    ranks = 1 if strategy == "one process" else dist.get_world_size()
    settings = dict(settings or {})
    more = settings.pop("callbacks", [])
    module, watch = Network(), Watch()
    if prepare is not None:
        prepare(module)
    guard = gp.GradientPolicies(
        policies(kind, frozen_state), seed=5, **{"agreement_every": 1, **(callback or {})}
    )
    trainer = Trainer(
        accelerator="gpu" if here().type == "cuda" else "cpu",
        devices=ranks,
        strategy=STRATEGIES[strategy](),
        precision=precision,  # type: ignore[arg-type]
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*more, guard, watch],
        plugins=[AtomicCheckpointIO()],
        **{"max_epochs": 2, "gradient_clip_val": 0.05, **settings},
    )
    trainer.fit(module, data(ranks), ckpt_path=resume_from, weights_only=True)
    if save_to is not None:
        trainer.save_checkpoint(save_to)
    return {
        "weights": {plain_name(name): whole(value) for name, value in module.named_parameters()},
        **masks_and_ages(module, watch.optimizer),
        "losses": watch.losses,
        "rebuilds": watch.rebuilds,
        "searched": watch.searched,
    }


def masks_and_ages(module: nn.Module, optimizer: Any) -> dict[str, dict[str, Tensor]]:
    if not isinstance(optimizer, gp.MaskedOptimizer):
        return {"masks": {}, "ages": {}}
    named = {plain_name(name): parameter for name, parameter in module.named_parameters()}
    return {
        "masks": {name: whole(optimizer.get_mask(p)).broadcast_to(p.shape) for name, p in named.items()},
        "ages": {name: whole(optimizer.age(p)).broadcast_to(p.shape) for name, p in named.items()},
    }


def check_equal(ranks: list[dict[str, Any]], expected: dict[str, Any], **tolerances: float) -> None:
    """Check that ranks know what `fit` told of another run, and that their weights are the same bits."""
    for what in ("masks", "ages"):
        assert ranks[0][what].keys() == expected[what].keys()
        assert all(torch.equal(ranks[0][what][name], value) for name, value in expected[what].items()), what
    for name, weight in expected["weights"].items():
        assert all(torch.equal(ranks[0]["weights"][name], rank["weights"][name]) for rank in ranks), name
        torch.testing.assert_close(
            ranks[0]["weights"][name], weight, **{"rtol": 2e-4, "atol": 2e-5, **tolerances}
        )
