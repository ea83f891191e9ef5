"""Compare what to train: ``python scripts/which_mask.py TASK --data DIRECTORY``.

Each method trains with each learning rate from one seed; the rate that is best on the validation part then
serves the other seeds, which are judged on the test part. Finished trials are read from the file of trials,
so an interrupted comparison continues where it stopped.
"""

import argparse
import io
import json
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from choosing.methods import METHODS, Method
from choosing.tasks import TASKS, Task
from torch import nn

import gradpolicy as gp
from gradpolicy.insight.costs import optimizer_bytes

TUNING_SEED, SEEDS = 100, (0, 1, 2)
Trial = dict[str, Any]


def gradient_bytes(model: nn.Module) -> int:
    """Return the bytes of the gradients that are held, of rows only where they are."""
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    return sum(getattr(gradient, "held", gradient).nbytes for gradient in gradients)


def saved_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of an optimizer's checkpoint."""
    torch.save(optimizer.state_dict(), file := io.BytesIO())
    return file.tell()


def merit(task: Task, method: Method, model: nn.Module, part: str) -> float:
    """Return the metric on a part; of the null, where it is an accuracy, that of the most frequent class."""
    if not method.trains and task.metric == "accuracy":
        return task.majority(part)
    return task.assess(model, part)


def run(task: Task, method: Method, seed: int, rate: float) -> Trial:
    """Train once, and return the metric on both parts, the median time of a step and the peaks in bytes."""
    model = method.prepare(task.start(seed))
    generator = torch.Generator().manual_seed(seed)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer: Any = torch.optim.AdamW(trained, lr=rate)
    steps = task.steps if method.trains else 0
    policies = method.policies(model, task.steps) if method.trains else []
    seconds, gradients, states = [], 0, 0
    with gp.training(model, optimizer, policies, seed) if policies else nullcontext(optimizer) as optimizer:
        for step in range(steps):
            count = len(task.parts["train"][1])
            batch = task.take("train", torch.randint(count, (task.batch,), generator=generator))
            for group in optimizer.param_groups:
                group["lr"] = rate * min((step + 1) / (steps / 10), (steps - step) / (0.9 * steps))
            begin = time.process_time()
            task.loss(model, batch).backward()
            gradients = max(gradients, gradient_bytes(model))
            optimizer.step()
            states = max(states, optimizer_bytes(optimizer))
            optimizer.zero_grad()
            seconds.append(time.process_time() - begin)
        # Within the block: a mask of the forward pass is lifted where it ends.
        metrics = {part: merit(task, method, model, part) for part in ("validation", "test")}
        saved = saved_bytes(optimizer) if steps else 0
    milliseconds = 1e3 * pd.Series(seconds, dtype=float).median()
    return {**metrics, "ms": milliseconds, "gradients": gradients, "state": states, "saved": saved}


def compare(name: str, task: Task, out: Path, wanted: str) -> pd.DataFrame:
    """Run what is missing, and return the table of methods."""
    out.parent.mkdir(parents=True, exist_ok=True)
    trials: dict[str, Trial] = json.loads(out.read_text()) if out.exists() else {}

    def trial(method: str, seed: int, rate: float) -> Trial:
        key = f"{method} | {seed} | {rate:g}"
        if key not in trials:
            trials[key] = run(task, METHODS[name][method], seed, rate)
            print(f"{key}: {trials[key]['validation']:.3f}", file=sys.stderr, flush=True)
            out.write_text(json.dumps(trials, indent=1))
        return trials[key]

    rows = {}
    for method in (each for each in METHODS[name] if wanted in each):
        rates = task.rates if METHODS[name][method].trains else task.rates[:1]
        scores = {rate: trial(method, TUNING_SEED, rate)["validation"] for rate in rates}
        best = (min if task.metric == "loss" else max)(scores, key=lambda rate: scores[rate])
        runs = pd.DataFrame([trial(method, seed, best) for seed in SEEDS])
        rows[method] = row(runs, best, task.metric)
    return pd.DataFrame(rows).T


def row(runs: pd.DataFrame, rate: float, metric: str) -> Mapping[str, str]:
    """Return a row of the table: means, and the sample standard deviation of the metric."""
    digits = 3 if metric == "loss" else 1
    means, spread = runs.mean(), runs["test"].std()
    bytes_ = {key: f"{means[key] / 1e6:.3g}" for key in ("gradients", "state", "saved")}
    return {
        f"test {metric}": f"{means['test']:.{digits}f} ± {spread:.{digits}f}",
        "rate": f"{rate:g}",
        "step, CPU ms": f"{means['ms']:.0f}",
        **{f"{key}, MB": value for key, value in bytes_.items()},
    }


def main() -> None:
    """Read the command line, compare, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("task", choices=TASKS)
    parser.add_argument("--data", type=Path, required=True, help="holds tiny_shakespeare and fashion_mnist")
    parser.add_argument("--out", type=Path, help="the file of trials")
    parser.add_argument("--only", default="", help="methods with this in their name")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    out = arguments.out or Path("outputs/which_mask") / f"{arguments.task}.json"
    print(compare(arguments.task, TASKS[arguments.task](arguments.data), out, arguments.only).to_markdown())


if __name__ == "__main__":
    main()
