"""GradientPoliciesCallback with DeepSpeed: Hugging Face's Trainer on gloo ranks, as on one process."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator, PartialState
from accelerate.utils import DeepSpeedPlugin, DistributedType
from deepspeed_ranks import NEEDS_DEEPSPEED, use_deepspeed_on_cpus, whole_weights
from process_pool import ProcessPool, RemoteError, here, refusal
from sharded import (
    PLACES,
    SAVED_AT,
    SETTINGS,
    STEPS,
    adapter_trainer,
    batch,
    forget_accelerate,
    forgets_accelerate,
    make_llama,
    training_data,
)
from small_bert import make_bert, make_data
from torch import Tensor, nn
from transformers import Trainer, TrainerCallback, TrainingArguments

import gradpolicy as gp
from gradpolicy.integrations.transformers import GradientPoliciesCallback

pytestmark = [pytest.mark.slow, NEEDS_DEEPSPEED, pytest.mark.xdist_group("deepspeed")]
BATCH, PARTS = 8, 2
Trained = tuple[dict[str, Tensor], int, dict[str, float]]
# An optimizer that the config names, instead of the Trainer's own.
TORCH_ADAM = {
    "type": "AdamW",
    "params": {"torch_adam": True, **dict.fromkeys(("lr", "betas", "eps", "weight_decay"), "auto")},
}


# --- what runs on the ranks


def policies(stage: int) -> tuple[str, dict[str, Any]]:
    """A model, and policies on it, for each stage others."""
    model = "bert" if stage == 1 else "llama"
    embedding, first, second = PLACES[model]
    if stage == 1:
        freeze = {"entries": gp.Freeze(gp.masks.Random(0.5, every=2), params="*", frozen_state="zero")}
    elif stage == 2:
        rows = gp.masks.Rows(rows="-9:-4")
        freeze = {
            "rows": gp.Freeze(rows, params=[embedding, f"{second}.*.weight"], frozen_state="drop"),
            "rest": gp.Freeze(gp.masks.Fixed(), params=f"{first}.*", frozen_state="drop"),
        }
    else:
        # Stage 3 gathers parameters for this one alone.
        signs = gp.masks.Function(lambda name, parameter, step: parameter > 0, every=2)
        freeze = {
            "signs": gp.Freeze(signs, params=embedding),
            "layers": gp.Freeze(gp.masks.Layerwise(active=1, every=2), params="*layers*"),
        }
    return model, {**freeze, "slow": gp.Scale(0.5, modules=second)}


class Watch(TrainerCallback):
    """Counts the frozen entries that updates have changed, and may kill its process."""

    def __init__(self, policies: GradientPoliciesCallback, killed_at: int | None = None) -> None:
        self.policies, self.killed_at, self.moved = policies, killed_at, 0

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = whole_weights(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        after, optimizer = whole_weights(model), self.policies.run.steps.masked[0]
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        for name, parameter in trained.items():
            active = optimizer.get_mask(parameter).expand(after[name].shape)
            self.moved += int(((after[name] != self.before[name]) & ~active).sum())
        if state.global_step == self.killed_at and dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@forgets_accelerate()
def train(
    stage: int,
    sharded: bool,
    folder: str,
    resume: int | None = None,
    killed_at: int | None = None,
    **settings: Any,
) -> Trained:
    """What the Trainer ends with: weights, the number of frozen entries that have changed, and a log.

    Args:
        stage: The stage of ZeRO, which chooses model, policies and optimizer too.
        sharded: True for DeepSpeed on these ranks, False for one process without.
        folder: Where checkpoints are.
        resume: The step whose checkpoint to go on from.
        killed_at: The step after which the second rank is killed.
        **settings: As TrainingArguments'.
    """
    trainer, watch = make_trainer(stage, sharded, folder, killed_at, **settings)
    trainer.train(resume_from_checkpoint=resume and str(Path(folder) / f"checkpoint-{resume}"))
    logs = [entry for entry in trainer.state.log_history if "loss" in entry]
    shares = {key: value for log in logs for key, value in log.items() if "active_share" in key}
    assert isinstance(trainer.model, nn.Module)
    return whole_weights(trainer.model), watch.moved, {**shares, "grad_norm": logs[-1]["grad_norm"]}


def make_trainer(
    stage: int, sharded: bool, folder: str, killed_at: int | None = None, **settings: Any
) -> tuple[Trainer, Watch]:
    kind, declared = policies(stage)
    callback = GradientPoliciesCallback(declared, seed=1)
    watch = Watch(callback, killed_at)
    arguments = make_arguments(TrainingArguments, folder, stage if sharded else 0, **settings)
    model = make_bert() if kind == "bert" else make_llama()
    return Trainer(model, arguments, train_dataset=training_data(kind), callbacks=[callback, watch]), watch


def make_arguments(kind: Any, folder: str, stage: int, **settings: Any) -> Any:
    """The settings of a Trainer with DeepSpeed on these ranks, or, for stage 0, without on one process."""
    forget_accelerate()
    use_cpu = here().type == "cpu"
    settings = {
        **SETTINGS,
        # So that Adam does not make much of the rounding of gradients that are nearly 0.
        "adam_epsilon": 1e-3,
        "lr_scheduler_type": "linear",
        "max_grad_norm": 0.05,
        "gradient_accumulation_steps": PARTS,
        "per_device_train_batch_size": BATCH // PARTS // (dist.get_world_size() if stage else 1),
        "logging_steps": 1,
        "use_cpu": use_cpu,
        **settings,
    }
    if stage:
        if use_cpu:
            use_deepspeed_on_cpus()
        auto = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
        config: dict[str, Any] = dict.fromkeys((*auto, "gradient_clipping"), "auto")
        config["zero_optimization"] = {"stage": stage, "stage3_param_persistence_threshold": 20}
        # The scale on the loss, which fp16 alone has, is too large in the first steps.
        config["fp16"] = {"enabled": "auto", "initial_scale_power": 24, "hysteresis": 1}
        config["bf16"] = {"enabled": "auto"}
        settings["deepspeed"] = {**config, **({"optimizer": TORCH_ADAM} if stage == 1 else {})}
    arguments = kind(folder, **settings)
    if stage and use_cpu:
        # On CPU ranks accelerate would use DDP without a word.
        PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    return arguments


# --- tests


@pytest.mark.supports(
    *("tensors", "rows", "entries", "frozen_state", "flow", "accumulation", "clipping", "resume"),
    loop="huggingface",
    processes="deepspeed",
)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_trainer_trains_on_two_ranks_what_it_does_on_one_process_and_resumes_bit_for_bit(
    ranks: ProcessPool, tmp_path: Path, stage: int
) -> None:
    wanted, _, logged = train(stage, False, str(tmp_path / "alone"))
    (first, moved, log), (second, *_) = ranks(train, stage, True, str(tmp_path / "ranks"))
    torch.testing.assert_close(first, wanted, rtol=0, atol=1e-6)
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert moved == 0
    assert log == pytest.approx(logged, rel=1e-4)
    for resumed, moved, _ in ranks(train, stage, True, str(tmp_path / "ranks"), SAVED_AT):
        assert all(torch.equal(first[name], resumed[name]) for name in first)
        assert moved == 0


@pytest.mark.supports("resume", loop="huggingface", processes="deepspeed")
def test_a_run_of_which_a_rank_was_killed_resumes_with_the_same_bits(
    ranks: ProcessPool, tmp_path: Path
) -> None:
    (first, *_), _ = ranks(train, 3, True, str(tmp_path / "whole"))
    with pytest.raises(RemoteError, match="the process died"):
        ranks(train, 3, True, str(tmp_path / "killed"), None, SAVED_AT + 1)
    for resumed, moved, _ in ranks(train, 3, True, str(tmp_path / "killed"), SAVED_AT):
        assert all(torch.equal(first[name], resumed[name]) for name in first)
        assert moved == 0


@forgets_accelerate()
def refused(folder: str) -> str:
    """What is said to a mask source that reads gradients."""
    arguments = make_arguments(TrainingArguments, folder, 1)
    callback = GradientPoliciesCallback({"some": gp.Freeze(gp.masks.TopK(0.5))})
    trainer = Trainer(make_bert(), arguments, train_dataset=make_data(), callbacks=[callback])
    return refusal(trainer.train)


@pytest.mark.supports(
    "gradient sources",
    loop="huggingface",
    processes="deepspeed",
    no="a rank has partitions, which hold parts of several parameters",
)
def test_what_cannot_be_exact_is_refused(ranks: ProcessPool, tmp_path: Path) -> None:
    for message in ranks(refused, str(tmp_path)):
        assert "policy.some: does not work with DeepSpeed: TopK needs whole gradients" in message


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-3)


@forgets_accelerate()
def with_accelerate() -> dict[str, Tensor]:
    """What a loop of one's own trains with the engine that accelerate prepares."""
    from gradpolicy.integrations.deepspeed import training

    forget_accelerate()
    use_deepspeed_on_cpus()
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.DEEPSPEED
    config = {"train_micro_batch_size_per_gpu": BATCH // 2, "zero_optimization": {"stage": 2}}
    plugin = DeepSpeedPlugin(hf_ds_config={**config, "gradient_clipping": 0.05})
    accelerator = Accelerator(deepspeed_plugin=plugin)
    model = make_llama()
    engine, _ = accelerator.prepare(model, adam(model))
    with training(engine, policies(2)[1], seed=1):
        for step in range(STEPS):
            accelerator.backward(engine(**batch("llama", step, dist.get_rank(), 2)).loss)
    return whole_weights(model)


def test_the_engine_that_accelerate_prepares_trains_in_a_loop_as_one_process(ranks: ProcessPool) -> None:
    model = make_llama()
    with gp.training(model, adam(model), policies(2)[1], seed=1) as optimizer:
        for step in range(STEPS):
            model(**batch("llama", step)).loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.05)
            optimizer.step()
            optimizer.zero_grad()
    for found in ranks(with_accelerate):
        torch.testing.assert_close(found, whole_weights(model), rtol=0.0, atol=1e-6)


@forgets_accelerate()
def fine_tune(folder: str, sharded: bool) -> tuple[dict[str, Tensor], int]:
    """Trains LoRA adapters by supervised fine-tuning; gives weights, and how many frozen entries moved."""
    trainer, watch = adapter_trainer(
        lambda kind: make_arguments(kind, folder, 2 if sharded else 0, bf16=False), Watch
    )
    trainer.train()
    assert isinstance(trainer.model, nn.Module)
    adapters = {name: each for name, each in whole_weights(trainer.model).items() if "lora" in name}
    return adapters, watch.moved


@pytest.mark.supports("adapters", loop="huggingface", processes="deepspeed")
def test_supervised_fine_tuning_of_adapters_is_as_on_one_process(ranks: ProcessPool, tmp_path: Path) -> None:
    wanted, _ = fine_tune(str(tmp_path / "alone"), False)
    for found, moved in ranks(fine_tune, str(tmp_path / "ranks"), True):
        assert moved == 0
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-6)
