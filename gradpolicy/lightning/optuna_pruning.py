"""Reports a trial's metric to an Optuna study, and ends a trial that is worse than the others."""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from gradpolicy.errors import PolicyError, nearest

PRUNED = "pruned"


def make_pruner() -> Any:
    """A pruner that ends a trial below the median of the others, after five trials and two reports.

    A study does not keep its pruner, so the program that draws the trials makes one too.
    """
    import optuna

    return optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=2)


class ReportToStudy(Callback):
    """Reports a metric to a study after each validation; `gradpolicy sweep` adds it to each trial.

    Args:
        storage: Where the study is kept, such as ``sqlite:///study.db``.
        study: The study's name.
        trial: The trial's number in the storage.
        monitor: The metric.

    Raises:
        PolicyError: If the metric is not logged.
    """

    def __init__(self, storage: str, study: str, trial: int, monitor: str) -> None:
        self.storage, self.study, self.trial, self.monitor = storage, study, trial, monitor
        self._trial: Any = None

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Reports the metric, and stops training if the study says so."""
        if trainer.sanity_checking or not trainer.is_global_zero:
            return
        value = trainer.callback_metrics.get(self.monitor)
        if value is None:
            raise PolicyError(
                f"monitor: {self.monitor!r} is not logged; {nearest(self.monitor, trainer.callback_metrics)}"
            )
        trial = self._load()
        trial.report(float(value), trainer.current_epoch)
        if trial.should_prune():
            trial.set_user_attr(PRUNED, True)
            trainer.should_stop = True

    def _load(self) -> Any:
        if self._trial is None:
            import optuna

            study = optuna.load_study(study_name=self.study, storage=self.storage, pruner=make_pruner())
            self._trial = optuna.trial.Trial(study, self.trial)
        return self._trial
