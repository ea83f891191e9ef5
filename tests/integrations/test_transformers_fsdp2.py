"""GradientPoliciesCallback under FSDP2: Hugging Face's Trainer on gloo ranks, as on one process."""

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import PartialState
from accelerate.utils import DistributedType
from process_pool import ProcessPool, RemoteError, here
from sharded import (
    FORMS,
    LAYERS,
    RUNS,
    SAVED_AT,
    SETTINGS,
    Facts,
    assert_same,
    count_moved,
    facts,
    forget_accelerate,
    forgets_accelerate,
    make_model,
    make_policies,
    mostly_slow,
    training_data,
)
from small_bert import make_data
from transformers import Trainer, TrainerCallback, TrainingArguments

from gradpolicy.integrations.transformers import GradientPoliciesCallback

BATCH = 8


class Watch(TrainerCallback):
    """Notes what is there after each update, and how many frozen entries an update has changed."""

    def __init__(self, policies: GradientPoliciesCallback) -> None:
        self.policies, self.moved, self.after = policies, 0, {}

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.before = facts(model, self.policies.run.steps.masked[0])

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any) -> None:
        self.after: Facts = facts(model, self.policies.run.steps.masked[0])
        self.moved += count_moved(self.before, self.after)


@forgets_accelerate()
def train_with_trainer(
    kinds: tuple[str, str, str],
    folder: str,
    ranks: int,
    form: str = FORMS[1],
    resume: int | None = None,
    mixed: bool = False,
) -> tuple[Facts, int]:
    """What training ends with, and how many frozen entries it has changed.

    Args:
        kinds: The model, the masks and the frozen state.
        folder: Where checkpoints are.
        ranks: The number of processes that share a batch; 0: one, that does not shard.
        form: The form of accelerate's checkpoints.
        resume: The step whose checkpoint to go on from.
        mixed: True for bfloat16 in the layers and float32 in weights and reduced gradients.
    """
    model = make_model(kinds[0]).to(torch.float32 if mixed else torch.float64)
    callback = GradientPoliciesCallback(make_policies(*kinds), seed=1, log=False)
    watch = Watch(callback)
    arguments = make_arguments(TrainingArguments, folder, ranks, form, kinds[0], bf16=mixed)
    trainer = Trainer(model, arguments, train_dataset=training_data(kinds[0]), callbacks=[callback, watch])
    assert trainer.accelerator.is_fsdp2 == bool(ranks)
    trainer.train(resume_from_checkpoint=resume and str(Path(folder) / f"checkpoint-{resume}"))
    return watch.after, watch.moved


def make_arguments(
    kind: Any, folder: str, ranks: int, form: str, model: str = "llama", **settings: Any
) -> Any:
    forget_accelerate()
    if ranks:
        layers = {"transformer_layer_cls_to_wrap": [LAYERS[model]]}
        settings |= {"fsdp": True, "fsdp_config": {"version": 2, "state_dict_type": form, **layers}}
    use_cpu = here().type == "cpu"
    own = {"lr_scheduler_type": "constant", "max_grad_norm": 0.5, "use_cpu": use_cpu}
    size = {"per_device_train_batch_size": BATCH // max(ranks, 1)}
    arguments = kind(folder, **{**SETTINGS, **own, **size, **settings})
    if ranks and use_cpu:
        # As in shard_with_accelerate.
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
    return arguments


@pytest.mark.parametrize(("kinds", "form"), mostly_slow(list(zip(RUNS[:4], FORMS[::-1] * 2, strict=True)), 0))
def test_the_trainer_trains_on_two_ranks_what_it_does_on_one_process_and_resumes_bit_for_bit(
    pair: ProcessPool, tmp_path: Path, kinds: tuple[str, str, str], form: str
) -> None:
    wanted, _ = train_with_trainer(kinds, str(tmp_path / "alone"), 0)
    (first, moved), (second, _) = pair(train_with_trainer, kinds, str(tmp_path / "ranks"), 2, form)
    assert_same(first, wanted)
    assert_same(second, first, exactly=True)
    assert moved == 0
    for resumed, _ in pair(train_with_trainer, kinds, str(tmp_path / "ranks"), 2, form, SAVED_AT):
        assert_same(resumed, first, exactly=True)


@pytest.mark.supports("mixed precision", loop="huggingface", processes="fsdp2")
@pytest.mark.slow
def test_in_mixed_precision_layers_thaw_and_a_run_resumes_bit_for_bit(
    pair: ProcessPool, tmp_path: Path
) -> None:
    kinds = ("llama", "layers", "keep")
    (first, moved), (second, _) = pair(train_with_trainer, kinds, str(tmp_path), 2, FORMS[0], None, True)
    assert moved == 0
    assert all(first["ages"][name].any() for name in first["ages"])
    assert_same(second, first, exactly=True)
    for resumed, _ in pair(train_with_trainer, kinds, str(tmp_path), 2, FORMS[0], SAVED_AT, True):
        assert_same(resumed, first, exactly=True)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_the_trainer_resumes_on_another_number_of_ranks(
    pools: dict[int, ProcessPool], tmp_path: Path, form: str
) -> None:
    kinds = ("llama", "topk", "drop")
    wanted, _ = train_with_trainer(kinds, str(tmp_path / "alone"), 0)
    pools[2](train_with_trainer, kinds, str(tmp_path), 2, form)
    for ranks in (1, 4):
        for resumed, moved in pools[ranks](train_with_trainer, kinds, str(tmp_path), ranks, form, SAVED_AT):
            assert_same(resumed, wanted)
            assert moved == 0


@forgets_accelerate()
def add_too_late(folder: str) -> None:
    arguments = make_arguments(TrainingArguments, folder, 2, FORMS[0])
    trainer = Trainer(make_model("llama"), arguments, train_dataset=make_data())
    trainer.add_callback(GradientPoliciesCallback(make_policies("llama", "rows", "keep")))
    trainer.train()


def test_a_callback_that_comes_after_the_trainer_is_made_is_refused(
    pair: ProcessPool, tmp_path: Path
) -> None:
    with pytest.raises(RemoteError, match=r"PolicyError.*callbacks=\[\.\.\.\]"):
        pair(add_too_late, str(tmp_path))
