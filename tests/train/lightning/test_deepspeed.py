"""Policies under Lightning's DeepSpeedStrategy: ranks train what one process trains, and frozen bits stay."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed_ranks import NEEDS_DEEPSPEED, ON_GPU, use_deepspeed_on_cpus, whole_weights
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.strategies import DDPStrategy, DeepSpeedStrategy
from process_pool import ProcessPool, RemoteError, here, refusal
from runs import Network, data, policies
from torch import Tensor, distributed, nn

import gradpolicy as gp
from gradpolicy.insight.audit import Audit
from gradpolicy.train.lightning.resume import ExactResume

pytestmark = [NEEDS_DEEPSPEED, pytest.mark.xdist_group("deepspeed")]
EPOCHS, SAVED_AT, UPDATES = 4, 2, 8
# The policies of each stage, with the frozen state.
KINDS = {1: ("rows", "drop"), 2: ("all kinds", "zero"), 3: ("layers", "keep")}
mostly_slow = pytest.mark.parametrize(
    "stage", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))]
)


# --- what runs on the ranks


class OnCPUs(DeepSpeedStrategy):
    """DeepSpeedStrategy without the check that each rank has a CUDA device."""

    root_device = torch.device("cpu", 0)

    def setup_environment(self) -> None:
        DDPStrategy.setup_environment(self)

    def setup_distributed(self) -> None:
        self.set_world_ranks()
        self._init_deepspeed_distributed()


def strategy_for(stage: int) -> Any:
    if not stage:
        return "auto"
    if here().type == "cuda":
        return DeepSpeedStrategy(stage=stage)
    use_deepspeed_on_cpus()
    return OnCPUs(stage=stage, sub_group_size=100)


class WithATest(Network):
    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss = nn.functional.mse_loss(self.head(self.layers(batch[0])), batch[1])
        self.log("test/loss", loss, sync_dist=True)


class Watch(Callback):
    """Counts the frozen entries that updates have changed, and keeps what a run ends with."""

    def __init__(self, policies: gp.GradientPolicies) -> None:
        self.policies, self.moved = policies, 0

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        self.before = whole_weights(pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        after, (optimizer,) = whole_weights(pl_module), self.policies.run.steps.masked
        for name, parameter in pl_module.named_parameters():
            frozen = ~optimizer.get_mask(parameter).expand(after[name].shape)
            self.moved += int(((after[name] != self.before[name]) & frozen).sum())

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.after, (optimizer,) = whole_weights(pl_module), self.policies.run.steps.masked
        self.updates = optimizer.effective_steps


def make_trainer(stage: int, declared: dict[str, Any], folder: str, **settings: Any) -> tuple[Trainer, Watch]:
    """A Trainer with DeepSpeed on these ranks, or, for stage 0, on one process without."""
    callback = gp.GradientPolicies(declared, seed=5)
    watch = Watch(callback)
    saving = ModelCheckpoint(folder, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=True)
    trainer = Trainer(
        accelerator="gpu" if here().type == "cuda" else "cpu",
        devices=distributed.get_world_size() if stage else 1,
        strategy=strategy_for(stage),
        logger=DummyLogger(),
        log_every_n_steps=1,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[saving, callback, watch],
        **{"max_epochs": EPOCHS, "gradient_clip_val": 0.05, "accumulate_grad_batches": 2, **settings},
    )
    return trainer, watch


def batches(stage: int) -> Any:
    return data(distributed.get_world_size() if stage else 1)


def fit(
    stage: int, kinds: tuple[str, str], folder: str, resume: bool = False, precision: str = "32-true"
) -> dict[str, Any]:
    """Train; return weights, updates, how many frozen entries these moved, and the shares that were logged.

    Args:
        stage: The stage of ZeRO; 0: one process without.
        kinds: The policies, and their frozen state.
        folder: Where checkpoints are.
        resume: Go on from the checkpoint in the middle.
        precision: As the Trainer's.
    """
    trainer, watch = make_trainer(stage, policies(*kinds), folder, precision=precision)
    middle = str(Path(folder) / f"epoch={SAVED_AT - 1}.ckpt") if resume else None
    trainer.fit(WithATest(), batches(stage), ckpt_path=middle, weights_only=None if stage else True)
    logged = {key: float(value) for key, value in trainer.callback_metrics.items() if "active" in key}
    return {"weights": watch.after, "updates": watch.updates, "moved": watch.moved, "logged": logged}


def loss_of(trainer: Trainer, module: WithATest, stage: int, checkpoint: str | None = None) -> float:
    (metrics,) = trainer.test(module, batches(stage), ckpt_path=checkpoint, verbose=False)
    return metrics["test/loss"]


def evaluate(stage: int, folder: str) -> list[float]:
    """Train for two epochs; return the losses of the first's checkpoint, here and in another Trainer."""
    declared = policies(*KINDS[2])
    first, _ = make_trainer(stage, declared, folder, max_epochs=2)
    first.fit(WithATest(), batches(stage))
    trainers = first, make_trainer(stage, declared, folder)[0]
    return [loss_of(trainer, WithATest(), stage, f"{folder}/epoch=0.ckpt") for trainer in trainers]


def evaluate_stage_3(folder: str) -> tuple[list[float], str]:
    """Train, then evaluate what that ended with, and its checkpoint; and return DeepSpeed's error for it."""
    trainer, _ = make_trainer(3, policies(*KINDS[2]), folder, max_epochs=1)
    module, path = WithATest(), f"{folder}/epoch=0.ckpt"
    trainer.fit(module, batches(3))
    found = loss_of(trainer, module, 3)
    with pytest.raises(AttributeError) as error:
        loss_of(trainer, module, 3, path)
    from lightning.pytorch.utilities.deepspeed import convert_zero_checkpoint_to_fp32_state_dict

    # Every rank writes a file of its own.
    file = f"{folder}/{distributed.get_rank()}.pt"
    module = WithATest()
    module.load_state_dict(convert_zero_checkpoint_to_fp32_state_dict(path, file)["state_dict"])
    trainer, _ = make_trainer(0, {}, folder)
    return [found, loss_of(trainer, module, 0)], str(error.value)


def audit(stage: int, folder: str) -> tuple[int, int]:
    """Train with an audit, and with exact resume; return its intervals and differences."""
    trainer, _ = make_trainer(stage, policies(*KINDS[2]), folder, max_epochs=2)
    trainer.callbacks += [ExactResume(), Audit(folder)]  # type: ignore[attr-defined]
    trainer.fit(WithATest(), batches(stage))
    trainer.strategy.barrier()
    found = json.loads((Path(folder) / "audit.json").read_text())
    return found["intervals"], found["changed"]


def refused(folder: str) -> str:
    """What is said to a source that reads gradients."""
    trainer, _ = make_trainer(1, {"some": gp.Freeze(gp.masks.TopK(0.5))}, folder)
    return refusal(trainer.fit, WithATest(), batches(1))


# --- tests


def assert_same_bits(found: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert found["moved"] == 0
    assert (found["updates"], found["logged"]) == (wanted["updates"], wanted["logged"])
    assert all(torch.equal(found["weights"][name], wanted["weights"][name]) for name in wanted["weights"])


@pytest.mark.supports(
    *("tensors", "rows", "entries", "frozen_state", "flow", "accumulation", "clipping", "resume"),
    loop="lightning",
    processes="deepspeed",
)
@mostly_slow
def test_two_ranks_equal_one_process_and_resume_bit_for_bit(
    ranks: ProcessPool, tmp_path: Path, stage: int
) -> None:
    wanted = fit(0, KINDS[stage], str(tmp_path / "alone"))
    first, second = ranks(fit, stage, KINDS[stage], str(tmp_path / "ranks"))
    assert (first["updates"], first["moved"]) == (UPDATES, 0)
    torch.testing.assert_close(first["weights"], wanted["weights"], rtol=0, atol=1e-6)
    assert first["logged"] == pytest.approx(wanted["logged"])
    assert_same_bits(second, first)
    for resumed in ranks(fit, stage, KINDS[stage], str(tmp_path / "ranks"), True):
        assert_same_bits(resumed, first)


@pytest.mark.supports("mixed precision", loop="lightning", processes="deepspeed")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [2, 3])
def test_in_bfloat16_frozen_bits_stay_and_a_run_resumes_bit_for_bit(
    ranks: ProcessPool, tmp_path: Path, stage: int
) -> None:
    first, _ = ranks(fit, stage, KINDS[stage], str(tmp_path), False, "bf16-mixed")
    assert (first["updates"], first["moved"]) == (UPDATES, 0)
    for resumed in ranks(fit, stage, KINDS[stage], str(tmp_path), True, "bf16-mixed"):
        assert_same_bits(resumed, first)


@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_a_checkpoint_is_evaluated_as_on_one_process(ranks: ProcessPool, tmp_path: Path, stage: int) -> None:
    wanted = evaluate(0, str(tmp_path / "alone"))
    for found in ranks(evaluate, stage, str(tmp_path / "ranks")):
        assert found == pytest.approx(wanted, abs=1e-6)


@pytest.mark.slow
def test_stage_3_evaluates_what_fit_ended_with_and_a_converted_checkpoint(
    ranks: ProcessPool, tmp_path: Path
) -> None:
    wanted = evaluate(0, str(tmp_path / "alone"))[0]
    for found, message in ranks(evaluate_stage_3, str(tmp_path / "ranks")):
        assert found == pytest.approx([wanted] * 2, abs=1e-6)
        # DeepSpeed 0.19.8, also without policies; docs/integrations/deepspeed.md says what to do.
        assert "_restore_from_bit16_weights" in message


@pytest.mark.supports("audit", loop="lightning", processes="deepspeed")
@pytest.mark.slow
@pytest.mark.parametrize("stage", [1, 2])
def test_the_audit_finds_no_frozen_entry_changed(ranks: ProcessPool, tmp_path: Path, stage: int) -> None:
    for intervals, changed in ranks(audit, stage, str(tmp_path)):
        assert intervals > 0
        assert changed == 0


@pytest.mark.supports(
    "audit",
    loop="lightning",
    processes="deepspeed",
    no="stage 3 of DeepSpeed keeps no full weights",
)
@pytest.mark.slow
def test_the_audit_is_refused_in_stage_3(ranks: ProcessPool, tmp_path: Path) -> None:
    with pytest.raises(RemoteError, match=r"PolicyError: callbacks\.audit: DeepSpeed's stage 3"):
        ranks(audit, 3, str(tmp_path))


@pytest.mark.supports(
    "gradient sources",
    loop="lightning",
    processes="deepspeed",
    no="a rank has partitions, which hold parts of several parameters",
)
def test_a_source_that_reads_gradients_is_refused(ranks: ProcessPool, tmp_path: Path) -> None:
    for message in ranks(refused, str(tmp_path)):
        assert "policy.some: does not work with DeepSpeed: TopK needs whole gradients" in message


ON_GPU_CASES = [(1, "32-true"), (2, "32-true"), (3, "32-true"), (3, "bf16-mixed"), (2, "16-mixed")]


@pytest.mark.parametrize(("stage", "precision"), [pytest.param(*case, marks=ON_GPU) for case in ON_GPU_CASES])
def test_on_a_gpu_frozen_bits_hold_and_a_run_resumes_bit_for_bit(
    gpu: ProcessPool, tmp_path: Path, stage: int, precision: str
) -> None:
    (first,) = gpu(fit, stage, KINDS[stage], str(tmp_path / "rank"), False, precision)
    # In fp16 the first updates may be skipped.
    assert first["updates"] == UPDATES or (precision == "16-mixed" and first["updates"] > 0)
    assert first["moved"] == 0
    (resumed,) = gpu(fit, stage, KINDS[stage], str(tmp_path / "rank"), True, precision)
    assert_same_bits(resumed, first)
    if precision == "32-true":
        (wanted,) = gpu(fit, 0, KINDS[stage], str(tmp_path / "alone"))
        torch.testing.assert_close(first["weights"], wanted["weights"], rtol=0, atol=1e-5)
