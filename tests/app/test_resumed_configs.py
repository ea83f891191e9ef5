"""A run is resumed under every optimizer, policy and callback in `conf/`."""

import pytest
import torch

from .test_configs import DATA, choices, ignored, run_under

GROUPS = ("optimizer", "policy", "callbacks")
QUICK = ("policy=phases", "callbacks=default")
CHOICES = [choice for choice in choices() if choice.partition("=")[0] in GROUPS]
# Schedules may depend on the number of epochs.
QUIET = ("test=false", "extras.plan=false", "trainer.max_epochs=2")


@ignored
@pytest.mark.parametrize(
    "choice", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in CHOICES]
)
def test_a_run_is_resumed_under(train, choice: str) -> None:
    group, _, name = choice.partition("=")
    settings = list(QUIET)
    if group == "callbacks" and name not in ("default", "model_checkpoint"):
        settings.append(f"callbacks=[model_checkpoint,{name}]")
    first = run_under(train, [choice], *settings, "++trainer.max_steps=2")
    if first.code and "data_dir" in first.message and not DATA.is_dir():
        pytest.skip("needs data that is not here")
    last = first.completed.run / "checkpoints/last.ckpt"
    again = run_under(train, [choice], *settings, f"ckpt_path={last}")
    assert f"going on from {last}" in again.completed.out
    assert again.left_nothing
    assert torch.load(last, weights_only=True)["global_step"] == 4
