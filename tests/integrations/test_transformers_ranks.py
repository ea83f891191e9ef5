"""Under Hugging Face's Trainer two ranks train as one process, by DDP and FSDP2, and resume."""

from pathlib import Path
from typing import Any

import pytest
import torch
from process_pool import ProcessPool
from sharded import (
    FORMS,
    SAVED_AT,
    Facts,
    adapter_trainer,
    assert_same,
    forgets_accelerate,
    make_model,
    make_policies,
    training_data,
)
from test_transformers_fsdp2 import BATCH, Watch, make_arguments
from transformers import Trainer, TrainingArguments

import gradpolicy as gp
from gradpolicy.integrations.transformers import GradientPoliciesCallback

FIRST, SECOND = "model.layers.0.*", "model.layers.1.*"
PHASES = [{"params": SECOND, "until": {"steps": 2}, "lr": 0.02}, {"params": "*"}]
POLICIES: dict[str, Any] = {
    "phases": lambda: {"thaw": gp.Freeze(gp.masks.Phases(PHASES))},
    "rates": lambda: {"rates": gp.Rates({FIRST: 0.3, "*norm*": {"weight_decay": 0.0}})},
    "cut": lambda: {
        "later": gp.Freeze(gp.masks.Fixed(), params="*layers.0.mlp.*", when=gp.When(stop=4)),
        "earlier": gp.Freeze(gp.masks.Fixed(), params="*layers.0.self_attn.*", when=gp.When(start=4)),
        "tenth": gp.Freeze(gp.masks.Random(density=0.1, every=2), params=SECOND),
        "cut": gp.Stop(modules="model.layers.1", when=gp.When(start=1, stop=5)),
    },
}
IN_THE_TABLE = {"layers": "tensors", "topk": "gradient sources", "cut": "flow"} | {
    "float32": "mixed precision",
    "bfloat16": "master weights",
}
UNDER_DDP = {"loop": "huggingface", "processes": "ddp"}
FROZEN_STATES = {"layers": "keep", "rows": "drop", "entries": "zero", "topk": "zero"}


def arguments_for(way: str, kind: Any, folder: str, **settings: Any) -> Any:
    size = BATCH if way == "one process" else BATCH // 2
    ranks = 2 if way == "fsdp2" else 0
    return make_arguments(kind, folder, ranks, FORMS[0], per_device_train_batch_size=size, **settings)


@forgets_accelerate()
def train(
    way: str, kind: str, folder: str, resume: int | None = None, dtype: str = "float64"
) -> tuple[Facts, int]:
    """Return what training ends with, and how many frozen entries it has changed."""
    model = make_model("llama").to(getattr(torch, dtype))
    if kind in POLICIES:
        policies = POLICIES[kind]()
    else:
        policies = make_policies("llama", kind, FROZEN_STATES[kind])
    master = dtype == "bfloat16"
    callback = GradientPoliciesCallback(policies, seed=1, log=False, agreement_every=1, master_weights=master)
    watch = Watch(callback)
    arguments = arguments_for(way, TrainingArguments, folder, bf16=dtype != "float64")
    callbacks = [callback, watch]
    trainer = Trainer(model, arguments, train_dataset=training_data("llama"), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume and str(Path(folder) / f"checkpoint-{resume}"))
    return watch.after, watch.moved


@pytest.mark.supports("{kind}", "resume", loop="huggingface", processes="{way}", names=IN_THE_TABLE)
@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("ddp", "topk"),
        *(
            pytest.param("ddp", kind, marks=pytest.mark.slow)
            for kind in ("layers", "rows", "entries", "phases", "rates")
        ),
        pytest.param(
            *("ddp", "cut"),
            marks=[
                pytest.mark.slow,
                pytest.mark.supports("tensors", "entries", "clipping", "agreement", **UNDER_DDP),
            ],
        ),
        *(pytest.param("fsdp2", kind, marks=pytest.mark.slow) for kind in POLICIES if kind != "cut"),
    ],
)
def test_two_ranks_train_what_one_process_trains_and_resume_bit_for_bit(
    pair: ProcessPool, tmp_path: Path, way: str, kind: str
) -> None:
    wanted, _ = train("one process", kind, str(tmp_path / "alone"))
    (first, moved), (second, _) = pair(train, way, kind, str(tmp_path / "ranks"))
    assert_same(first, wanted)
    assert_same(second, first, exactly=True)
    assert moved == 0
    for resumed, _ in pair(train, way, kind, str(tmp_path / "ranks"), SAVED_AT):
        assert_same(resumed, first, exactly=True)


@pytest.mark.supports("{dtype}", **UNDER_DDP, names=IN_THE_TABLE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.slow
def test_in_mixed_precision_ranks_agree_and_resume_bit_for_bit(
    pair: ProcessPool, tmp_path: Path, dtype: str
) -> None:
    (first, moved), (second, _) = pair(train, "ddp", "entries", str(tmp_path), None, dtype)
    assert moved == 0
    assert_same(second, first, exactly=True)
    for resumed, _ in pair(train, "ddp", "entries", str(tmp_path), SAVED_AT, dtype):
        assert_same(resumed, first, exactly=True)


@forgets_accelerate()
def fine_tune(way: str, folder: str) -> tuple[dict[str, Any], int]:
    """Train LoRA adapters by supervised fine-tuning; return weights, and how many frozen entries moved."""
    # Adam would make much of the rounding of gradients that are nearly 0.
    settings = {"bf16": False, "optim": "sgd", "learning_rate": 1.0}
    trainer, watch = adapter_trainer(lambda kind: arguments_for(way, kind, folder, **settings), Watch)
    trainer.train()
    return watch.after["weights"], watch.moved


@pytest.mark.supports("adapters", loop="huggingface", processes="{way}")
@pytest.mark.parametrize("way", ["ddp", "fsdp2"])
@pytest.mark.slow
def test_supervised_fine_tuning_of_adapters_is_as_on_one_process(
    pair: ProcessPool, tmp_path: Path, way: str
) -> None:
    wanted, moved = fine_tune("one process", str(tmp_path / "alone"))
    assert moved == 0
    assert all(weight.any() for name, weight in wanted.items() if "lora_B" in name), "they begin with 0"
    for found, moved in pair(fine_tune, way, str(tmp_path / "ranks")):
        assert moved == 0
        torch.testing.assert_close(found, wanted, rtol=0.0, atol=1e-6)
