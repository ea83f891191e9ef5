"""Trains the small BERT on the ranks that torchrun starts; each writes the weights that it ends with."""

import os
import sys
from pathlib import Path

import torch
from small_bert import ddp_policies, make_bert, make_data
from transformers import Trainer, TrainingArguments

from gradpolicy.integrations.transformers import GradientPoliciesCallback

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model = make_bert()
    arguments = TrainingArguments(
        str(folder / "run"),
        num_train_epochs=2,
        per_device_train_batch_size=2,
        learning_rate=1e-2,
        lr_scheduler_type="constant",
        train_sampling_strategy="sequential",
        max_grad_norm=0.05,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    callback = GradientPoliciesCallback(ddp_policies(), agreement_every=1)
    Trainer(model, arguments, train_dataset=make_data(), callbacks=[callback]).train()
    torch.save(model.state_dict(), folder / f"rank{os.environ['RANK']}.pt")
