"""The small BERT, its training under Hugging Face's Trainer, and processes joined by a process group."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate.state import AcceleratorState
from deepspeed_ranks import gpu, ranks
from pool_fixtures import pair, pools
from small_bert import make_bert, make_data
from transformers import BertForSequenceClassification, Trainer, TrainingArguments

from gradpolicy.integrations.transformers import GradientPoliciesCallback

__all__ = ["gpu", "pair", "pools", "ranks"]


@pytest.fixture(autouse=True)
def _accelerate_as_new() -> Iterator[None]:
    """Accelerate keeps precision and processes for the whole program."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)


@pytest.fixture
def bert() -> BertForSequenceClassification:
    return make_bert()


@pytest.fixture
def train(tmp_path: Path) -> Callable[..., tuple[Trainer, GradientPoliciesCallback]]:
    """Trains under Hugging Face's Trainer; settings as TrainingArguments'."""

    def train_it(
        model: torch.nn.Module,
        policies: dict[str, Any],
        *,
        resume: str | None = None,
        callbacks: tuple = (),
        prepare: Callable[[Trainer], None] = lambda trainer: None,
        kind: type[Trainer] = Trainer,
        data: list | None = None,
        evaluated: dict[str, list] | None = None,
        log: bool = True,
        step_in_backward: bool = False,
        master_weights: bool = False,
        **settings: Any,
    ) -> tuple[Trainer, GradientPoliciesCallback]:
        defaults: dict[str, Any] = {
            "output_dir": str(tmp_path / "run"),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 4,
            "learning_rate": 1e-2,
            "lr_scheduler_type": "constant",
            "train_sampling_strategy": "sequential",
            "max_grad_norm": 0.05,
            "logging_steps": 1,
            "save_strategy": "no",
            "report_to": [],
            "use_cpu": True,
            "disable_tqdm": True,
        }
        if "activation_checkpointing" not in TrainingArguments.__dataclass_fields__:
            # Older versions of transformers name it gradient_checkpointing.
            settings = {name.replace("activation", "gradient"): value for name, value in settings.items()}
        callback = GradientPoliciesCallback(
            policies, log=log, step_in_backward=step_in_backward, master_weights=master_weights
        )
        trainer = kind(
            model,
            TrainingArguments(**{**defaults, **settings}),
            train_dataset=data or make_data(),
            eval_dataset=evaluated or data or make_data(),
            callbacks=[callback, *callbacks],
        )
        prepare(trainer)
        trainer.train(resume_from_checkpoint=resume)
        return trainer, callback

    return train_it
