"""Hugging Face's Trainer on one GPU: FSDP2 as accelerate sets it up, and DeepSpeed in every precision."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_transformers_deepspeed as with_deepspeed
import test_transformers_fsdp2 as with_fsdp2
import torch
from deepspeed_ranks import NEEDS_DEEPSPEED, ON_GPU
from process_pool import ProcessPool
from sharded import FORMS, RUNS, SAVED_AT, assert_same, forgets_accelerate

pytestmark = [
    *ON_GPU,
    pytest.mark.xdist_group("on_a_gpu"),
]


# --- what runs in that process


def reproducibly(function: Callable[..., Any], *arguments: Any, **settings: Any) -> Any:
    """Call a function; where CUDA has several algorithms, choose one that gives the same bits each time."""
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cuda.enable_flash_sdp(False)
    torch.backends.cuda.enable_mem_efficient_sdp(False)
    torch.backends.cuda.enable_cudnn_sdp(False)
    return function(*arguments, **settings)


def train_with_fsdp2(kinds: tuple[str, str, str], folder: str, form: str, resume: int | None) -> Any:
    return reproducibly(with_fsdp2.train_with_trainer, kinds, folder, 1, form, resume)


def train_with_deepspeed(stage: int, precision: str, folder: str, resume: int | None) -> Any:
    settings = {} if precision == "fp32" else {precision: True}
    return reproducibly(with_deepspeed.train, stage, True, folder, resume, **settings)


@forgets_accelerate()
def overflow(folder: str, steps: int) -> tuple[int, int, int]:
    """Train in fp16; return the updates that were counted and skipped, and the frozen entries that moved."""
    trainer, watch = with_deepspeed.make_trainer(2, True, folder, max_steps=steps, fp16=True)
    trainer.train()
    (optimizer,) = watch.policies.run.steps.masked
    return optimizer.effective_steps, trainer.model_wrapped.skipped_steps, watch.moved


# --- tests


@pytest.mark.parametrize(("kinds", "form"), list(zip(RUNS[:2], FORMS, strict=True)))
def test_the_trainer_shards_with_fsdp2_trains_as_on_the_cpu_and_resumes_bit_for_bit(
    gpu: ProcessPool, tmp_path: Path, kinds: tuple[str, str, str], form: str
) -> None:
    ((first, moved),) = gpu(train_with_fsdp2, kinds, str(tmp_path / "rank"), form, None)
    assert moved == 0
    ((resumed, moved),) = gpu(train_with_fsdp2, kinds, str(tmp_path / "rank"), form, SAVED_AT)
    assert moved == 0
    assert_same(resumed, first, exactly=True)
    wanted, _ = with_fsdp2.train_with_trainer(kinds, str(tmp_path / "alone"), 0)
    assert_same(first, wanted)


@NEEDS_DEEPSPEED
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("stage", [2, 3])
def test_the_trainer_with_deepspeed_holds_frozen_bits_and_resumes_bit_for_bit(
    gpu: ProcessPool, tmp_path: Path, stage: int, precision: str
) -> None:
    ((first, moved, _),) = gpu(train_with_deepspeed, stage, precision, str(tmp_path), None)
    assert moved == 0
    ((resumed, moved, _),) = gpu(train_with_deepspeed, stage, precision, str(tmp_path), SAVED_AT)
    assert moved == 0
    assert all(torch.equal(first[name], resumed[name]) for name in first)
    if precision == "fp32":
        wanted, *_ = with_deepspeed.train(stage, False, str(tmp_path / "alone"))
        torch.testing.assert_close(first, wanted, rtol=0, atol=1e-5)


@NEEDS_DEEPSPEED
def test_a_step_that_overflows_in_fp16_is_skipped_and_does_not_count(
    gpu: ProcessPool, tmp_path: Path
) -> None:
    ((updates, skipped, moved),) = gpu(overflow, str(tmp_path), 18)
    assert moved == 0
    assert updates > 0
    assert skipped > 0
    assert updates + skipped == 18
