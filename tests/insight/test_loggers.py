"""Every logger gets config and plan."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from torch import nn

import gradpolicy as gp
from gradpolicy.insight.loggers import LogRun, hyperparameters, name_loggers

CONFIG: dict[str, Any] = {
    "policy": {
        "half": {"_target_": "gradpolicy.Freeze", "mask": {"density": 0.5}, "params": ["0.*"]},
        "gone": None,
        "cut": {"_target_": "gradpolicy.Stop"},
    },
    "seed": 3,
    "ckpt_path": None,
    "paths": {"output_dir": "/somewhere"},
}
FLAT = {
    "policies": "half+cut",
    "policy.half._target_": "gradpolicy.Freeze",
    "policy.half.mask.density": 0.5,
    "policy.half.params": "['0.*']",
    "seed": 3,
}


def planned() -> Any:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 1))
    policies = {"half": gp.Freeze(gp.masks.Random(0.5), params="0.*")}
    return gp.plan(model, policies, lambda copy: copy(torch.ones(1, 2)).sum())


def tell(logger: Any, *, first_rank: bool = True) -> None:
    reporter = LogRun(CONFIG, planned(), ["val/loss"])
    trainer = SimpleNamespace(is_global_zero=first_rank, loggers=[logger])
    # A run that fits and then tests sets up twice.
    for stage in ("fit", "test"):
        reporter.setup(trainer, None, stage)


def test_hyperparameters_are_one_value_a_key_without_where_the_run_writes() -> None:
    found = hyperparameters(CONFIG)
    assert {key: found[key] for key in FLAT} == FLAT
    assert not any(key.startswith(("paths", "ckpt_path", "policy.gone")) for key in found)


def test_names_say_policies_overrides_and_sweep() -> None:
    loggers: dict[str, Any] = {
        "wandb": {"_target_": "lightning.pytorch.loggers.WandbLogger", "name": None, "group": None},
        "mlflow": {"_target_": "lightning.pytorch.loggers.MLFlowLogger", "run_name": None},
        "mine": {"_target_": "lightning.pytorch.loggers.WandbLogger", "name": "mine", "group": None},
        "csv": {"_target_": "lightning.pytorch.loggers.CSVLogger", "name": None},
        "none": None,
    }
    name_loggers(
        {**CONFIG, "logger": loggers},
        ["optimizer.lr=0.1", "policy=[a,b]", "policy.half.mask.density=0.2", "logger=wandb", "+paths.x=1"],
        "lr",
    )
    name = "half+cut seed=3 policy.half.mask.density=0.2 optimizer.lr=0.1"
    assert (loggers["wandb"]["name"], loggers["wandb"]["group"]) == (name, "half+cut sweep lr")
    assert loggers["mlflow"]["run_name"] == name
    assert loggers["mine"]["name"] == "mine"
    assert loggers["csv"]["name"] is None


def test_other_ranks_tell_nothing(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="")
    tell(logger, first_rank=False)
    assert not logger.experiment.hparams


def test_tensorboard_has_a_table_of_runs_and_the_plan(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

    logger = TensorBoardLogger(tmp_path, name="", default_hp_metric=False)
    tell(logger)
    logger.save()
    events = accumulator.EventAccumulator(logger.log_dir)
    events.Reload()

    def said(tag: str) -> HParamsPluginData:
        return HParamsPluginData.FromString(events.summary_metadata[tag].plugin_data.content)

    hparams = said("_hparams_/session_start_info").session_start_info.hparams
    assert hparams["policy.half.mask.density"].number_value == 0.5
    assert hparams["policies"].string_value == FLAT["policies"]
    (metric,) = said("_hparams_/experiment").experiment.metric_infos
    assert metric.name.tag == "val/loss"
    (text,) = events.Tensors("plan/text_summary")
    assert text.tensor_proto.string_val[0].decode().startswith("<pre>Plan")


@pytest.mark.slow
def test_wandb_has_config_and_plan(tmp_path: Path) -> None:
    import wandb

    logger = WandbLogger(save_dir=tmp_path, mode="offline", settings={"silent": True})
    tell(logger)
    config = dict(logger.experiment.config)
    assert config["policy"]["half"]["mask"]["density"] == 0.5
    assert config["policies"] == FLAT["policies"]
    wandb.finish()
    (folder,) = (tmp_path / "wandb").glob("offline-run-*")
    (table,) = folder.rglob("*.table.json")
    assert json.loads(table.read_text())["data"][0][:2] == ["half", "Freeze · Random"]


@pytest.mark.slow
def test_mlflow_has_parameters_and_plan(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path}/mlflow.db"
    logger = MLFlowLogger("mine", "named", store, artifact_location=str(tmp_path / "mlflow"))
    tell(logger)
    run = logger.experiment.get_run(logger.run_id)
    assert run.info.run_name == "named"
    assert run.data.params["policy.half.mask.density"] == "0.5"
    kept = {file.path for file in logger.experiment.list_artifacts(logger.run_id)}
    assert kept == {"config.yaml", "plan.json", "plan.txt"}
