"""Logs the config and the plan of a run."""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import Logger, MLFlowLogger, TensorBoardLogger, WandbLogger

from gradpolicy.files import write_json
from gradpolicy.insight.run_files import PLAN, PLAN_TEXT, flat
from gradpolicy.planning.plan_table import HEADINGS, Plan, cells

# Keys of the config with paths of the run.
PATHS = ("paths", "logger", "extras")
# Keys that are not part of a run's name.
UNNAMED = (*PATHS, "extensions", "policy", "callbacks", "tags", "ckpt_path", "hydra")
# The maximum length of a name in W&B, in characters.
LONGEST_NAME = 128


def write_plan(plan: Plan, directory: Path) -> None:
    """Write a plan to a run's directory, as ``plan.json`` and ``plan.txt``."""
    write_json(directory / PLAN, plan.to_dict())
    (directory / PLAN_TEXT).write_text(f"{plan}\n", encoding="utf-8")


def hyperparameters(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a resolved config as numbers, strings and bools by dotted key, for filtering runs.

    Without callbacks and paths, which would hide the keys in which runs differ.

    Example:
        >>> hyperparameters({"seed": 3, "policy": {"half": {"mask": {"density": 0.5}}}, "paths": {}})
        {'policies': 'half', 'seed': 3, 'policy.half.mask.density': 0.5}
    """
    kept = {key: value for key, value in config.items() if key not in (*PATHS, "extensions", "callbacks")}
    values = {key: value for key, value in flat(kept).items() if value is not None and value != {}}
    texts = {key: str(value) for key, value in values.items() if not isinstance(value, str | int | float)}
    return {"policies": policies_of(config), **values, **texts}


def policies_of(config: Mapping[str, Any]) -> str:
    """Return the names of a config's policies, such as ``stop+guided``; ``none`` without policies."""
    named = config.get("policy") or {}
    return "+".join(name for name, node in named.items() if node is not None) or "none"


def name_loggers(config: Mapping[str, Any], overrides: Sequence[str], sweep: str | None) -> None:
    """Set the default names of runs and groups in the loggers of a config.

    A run is named by its policies and its overrides, its group by its policies and its sweep.

    Args:
        config: The resolved config, which is changed.
        overrides: The overrides of the command line.
        sweep: The name of the sweep of the run.
    """
    policies = policies_of(config)
    plain = [line.lstrip("+~") for line in overrides]
    of_policies = [line for line in plain if line.startswith("policy.")]
    others = [line for line in plain if not line.startswith((*UNNAMED, "seed="))]
    name = " ".join([policies, f"seed={config['seed']}", *of_policies, *others])[:LONGEST_NAME]
    group = (f"{policies} sweep {sweep}" if sweep else policies)[:LONGEST_NAME]
    names = {"WandbLogger": {"name": name, "group": group}, "MLFlowLogger": {"run_name": name}}
    for node in filter(None, (config.get("logger") or {}).values()):
        open_names = names.get(str(node.get("_target_")).rpartition(".")[2], {})
        node.update({key: value for key, value in open_names.items() if node.get(key) is None})


class LogRun(Callback):
    """Logs the config and the plan at the start of a run, on the first rank.

    Args:
        config: The resolved config.
        plan: The plan, if there is one.
        metrics: The metrics by which runs are compared, for TensorBoard's table of runs.
    """

    def __init__(self, config: Mapping[str, Any], plan: Plan | None, metrics: Sequence[str] = ()) -> None:
        self.config = config
        self.plan = plan
        self.metrics = metrics
        self._logged = False

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Log them once per run."""
        if not self._logged and trainer.is_global_zero:
            self._logged = True
            for logger in trainer.loggers:
                self._log(logger)

    def _log(self, logger: Logger) -> None:
        if isinstance(logger, TensorBoardLogger):
            self._log_tensorboard(logger)
        elif isinstance(logger, MLFlowLogger):
            self._log_mlflow(logger)
        else:
            logger.log_hyperparams({"policies": policies_of(self.config), **self.config})
        if isinstance(logger, WandbLogger) and self.plan is not None:
            logger.log_table("plan", list(HEADINGS), [list(cells(row)) for row in self.plan.rows])

    def _log_tensorboard(self, logger: TensorBoardLogger) -> None:
        from torch.utils.tensorboard.summary import hparams

        # This writes hparams.yaml; the table of runs would also need values of the metrics.
        logger.log_hyperparams(dict(self.config))
        writer = logger.experiment
        for summary in hparams(hyperparameters(self.config), dict.fromkeys(self.metrics)):
            writer._get_file_writer().add_summary(summary)
        if self.plan is not None:
            writer.add_text("plan", f"<pre>{escape(str(self.plan))}</pre>")

    def _log_mlflow(self, logger: MLFlowLogger) -> None:
        client, run = logger.experiment, logger.run_id
        # MLflow does not allow changing parameters; the changes of a resumed run are in its config.yaml.
        known = client.get_run(run).data.params
        values = hyperparameters(self.config).items()
        logger.log_hyperparams({key: value for key, value in values if key not in known})
        client.log_dict(run, dict(self.config), "config.yaml")
        if self.plan is not None:
            client.log_dict(run, self.plan.to_dict(), PLAN)
            client.log_text(run, f"{self.plan}\n", PLAN_TEXT)
