"""Makes run directories in the formats that a run writes, without a run."""

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from gradpolicy.insight.run_files import AuditFile, Result
from gradpolicy.train.lightning.runs import RunRecord

# A proof that holds.
AUDIT = AuditFile(intervals=1284, entries=900_000, changed=0, sampled=True)
LAYERS = {"model.trunk.0.conv": 144, "model.trunk.1.conv": 2304, "model.trunk.2.fc": 640}


def write_run(
    directory: Path, *, seed: int = 0, lr: float = 0.01, accuracy: float = 0.9, steps: int = 60
) -> Path:
    """Writes all the files of a run with a stop and a random freeze."""
    directory.mkdir(parents=True)
    config = config_of(directory, seed, lr)
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    write_json(directory / "plan.json", plan())
    write_json(directory / "audit.json", AUDIT.model_dump())
    RunRecord("train", "run", 1.7e9, str(directory), {"torch": "2.11.0", "gradpolicy": "0.1.0"}).save()
    best = accuracy + 0.01
    metrics = {"test/accuracy": accuracy, "test/loss": 1 - accuracy, "val/accuracy_best": best}
    result = Result([f"optimizer.lr={lr}", f"seed={seed}"], metrics, best, directory=str(directory))
    result.save(directory / "result.json")
    (directory / "train.log").write_text("Plan\nwarning: the learning rate is <large> & odd\n")
    write_metrics(directory, seed, steps)
    lines = [json.dumps(row) for row in record(seed, steps)]
    (directory / "record.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def write_json(path: Path, content: Any) -> None:
    """Writes JSON."""
    path.write_text(json.dumps(content))


def config_of(directory: Path, seed: int, lr: float) -> dict[str, Any]:
    """A nested config."""
    return {
        "seed": seed,
        "optimizer": {"_target_": "torch.optim.AdamW", "lr": lr},
        "optimized_metric": "val/accuracy_best",
        "policy": {"freeze": {"mask": {"density": 0.5}}},
        "callbacks": {"checkpoint": {"dirpath": f"{directory}/checkpoints"}},
        "paths": {"output_dir": str(directory)},
    }


def row(name: str, policy: str, where: str, **more: Any) -> dict[str, Any]:
    """A row of the plan."""
    return {"name": name, "policy": policy, "what": policy, "where": where, **more}


def plan() -> dict[str, Any]:
    """The plan of a run."""
    freezing = {
        "what": "Freeze · Random",
        "parameters": [f"{layer}.weight" for layer in LAYERS],
        "entries": 3088,
        "active_share": 0.5,
        "training_share": 0.25,
        "course": "may change every 5 steps",
    }
    return {
        "rows": [
            row("cut", "Stop", "input of model.probe", modules=["model.probe"]),
            row("through", "StraightThrough", "ops round", operations={"round": 3}),
            row("freeze", "Freeze", "params model.trunk.*", **freezing),
        ],
        "entries": 4000,
        "training_entries": 2456,
        "warnings": ["cut: <b>the probe</b> trains alone"],
        "layers": {
            "rows": [
                {"name": "model.trunk.0–2", "trains": "conv", "entries": 3088, "training": 1544, "rate": "×1"}
                | {"mode": "train", "share": 0.5},
                {"name": "model.probe", "trains": "nothing", "entries": 912, "training": 0, "rate": ""}
                | {"mode": "eval", "share": 0.0},
            ],
            "unmatched": "A policy matches each parameter.",
        },
        "cuts": ["input of modules model.probe (cut)"],
        "without_gradient": [],
    }


def write_metrics(directory: Path, seed: int, steps: int) -> None:
    """Curves as CSVLogger writes them: a row a step, empty where a metric was not logged."""
    folder = directory / "csv" / "version_0"
    folder.mkdir(parents=True)
    lines = ["epoch,step,train/loss,val/loss,val/accuracy,policy/freeze/active_share"]
    for step in range(4, steps, 5):
        loss = math.exp(-step / 30) * (1 + 0.05 * seed)
        lines.append(f"{step // 20},{step},{loss},,,0.5")
        if step % 20 == 19:
            lines.append(f"{step // 20},{step},,{loss * 1.1},{1 - loss / 2},")
    (folder / "metrics.csv").write_text("\n".join(lines) + "\n")


def record(seed: int, steps: int) -> list[dict[str, Any]]:
    """The lines of a record with a change every five steps."""
    generator = np.random.default_rng(seed)
    count = len(LAYERS)
    lines: list[dict[str, Any]] = []
    for step in range(0, steps, 5):
        time = {"step": step, "epoch": step // 20}
        shares = [0.5 + 0.1 * math.sin(step / 9 + index) for index in range(count)]
        active = [int(entries * share) for entries, share in zip(LAYERS.values(), shares, strict=True)]
        lines.append(
            {
                **time,
                "kind": "freeze",
                "policy": "freeze",
                "parameter": [f"{layer}.weight" for layer in LAYERS],
                "entries": list(LAYERS.values()),
                "active": active,
                "flipped": [int(generator.integers(100)) if step else 0 for _ in LAYERS],
                "weight_norm": [1.0] * count,
                "update_norm": [1e-3] * count,
                "gradient_norm_before": [2.0 / (index + 1) for index in range(count)],
                "gradient_norm_after": [1.4 / (index + 1) for index in range(count)],
                "state_bytes": [8 * each for each in active],
            }
        )
        for policy, after in (("cut", None), ("through", 0.03)):
            norms = {"gradient_norm_before": 0.04, "gradient_norm_after": after}
            flow = {"operations": 3, "zeros_passed": 0.2, "active": True}
            lines.append({**time, "kind": "flow", "policy": policy, **flow, **norms})
    return lines
