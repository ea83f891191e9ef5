"""A trial that will not be among the best is ended, and its study says so."""

from pathlib import Path

import optuna
import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader

from gradpolicy.errors import PolicyError
from gradpolicy.lightning.optuna_pruning import PRUNED, ReportToStudy, make_pruner

EPOCHS = 6
GOOD = 0.5


class Scores(LightningModule):
    """Logs the same score after each epoch."""

    def __init__(self, score: float) -> None:
        super().__init__()
        self.score = score
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def validation_step(self, batch: torch.Tensor, index: int) -> None:
        self.log("val/score", self.score)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


@pytest.fixture
def study(tmp_path: Path) -> optuna.Study:
    """A study in which five trials ended well."""
    storage = f"sqlite:///{tmp_path}/study.db"
    made = optuna.create_study(study_name="s", storage=storage, direction="maximize", pruner=make_pruner())
    course = dict.fromkeys(range(EPOCHS), GOOD)
    for _ in range(5):
        made.add_trial(optuna.trial.create_trial(value=GOOD, intermediate_values=course))
    return made


def run_trial(
    study: optuna.Study, storage: Path, score: float, monitor: str = "val/score"
) -> tuple[int, optuna.trial.FrozenTrial]:
    """Trains within a new trial; how many epochs it ran, and the trial."""
    trial = study.ask()
    data = DataLoader(torch.ones(1, 1))
    trainer = Trainer(
        max_epochs=EPOCHS,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[ReportToStudy(f"sqlite:///{storage}/study.db", "s", trial._trial_id, monitor)],
    )
    trainer.fit(Scores(score), data, data)
    return trainer.current_epoch, study.trials[trial.number]


def test_a_trial_below_the_median_ends_after_its_first_two_reports(
    study: optuna.Study, tmp_path: Path
) -> None:
    epochs, trial = run_trial(study, tmp_path, score=GOOD / 2)
    assert trial.intermediate_values == dict.fromkeys(range(3), GOOD / 2)
    assert epochs == 3
    assert trial.user_attrs[PRUNED]


def test_a_trial_among_the_best_runs_to_its_end(study: optuna.Study, tmp_path: Path) -> None:
    epochs, trial = run_trial(study, tmp_path, score=2 * GOOD)
    assert epochs == EPOCHS == len(trial.intermediate_values)
    assert PRUNED not in trial.user_attrs


def test_a_metric_that_is_not_logged_is_refused_by_name(study: optuna.Study, tmp_path: Path) -> None:
    with pytest.raises(PolicyError, match=r"'val/skore' is not logged; did you mean 'val/score'"):
        run_trial(study, tmp_path, score=GOOD, monitor="val/skore")
