"""Kills a training run again and again at random moments and asks whether anybody could tell.

    python scripts/soak.py --kills 30
    python scripts/soak.py --kills 5 --ranks 2 --workers 2 --accumulate 2

A run of ``train.py`` is left alone once. Then the same run is killed (SIGKILL, all its processes at once) at
moments drawn at random, and started again each time with ``ckpt_path=last``. In the end both must hold the
same bits (weights, moments, masks, ages, schedulers, random states, loop counters), and their newest
``metrics.csv`` must be the same row for row. A run that comes to its end before it was killed often enough is
compared, and the next one begins.
"""

import argparse
import csv
import json
import os
import random
import signal
import socket
import sys
import tempfile
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# Everything that a run imports is imported once, here; each run is a fork.
import gradpolicy.launch.run  # noqa: F401
from gradpolicy.errors import PolicyError
from gradpolicy.launch.app import main as train

ROOT = Path(__file__).resolve().parents[1]
# Differs from run to run without meaning: places, and what a callback remembers of them.
VOLATILE = ("ModelCheckpoint", ".path")


@dataclass(frozen=True)
class Setting:
    """What is run.

    Attributes:
        ranks: Processes that train together.
        workers: Loader processes of each.
        accumulate: Batches to an update.
        epochs: Length of the run.
        overrides: More for the command line of ``train.py``.
    """

    ranks: int = 1
    workers: int = 0
    accumulate: int = 1
    epochs: int = 4
    overrides: tuple[str, ...] = ()

    def command(self, folder: Path, save_every: int) -> list[str]:
        """The command line of ``train.py``."""
        return [
            f"hydra.run.dir={folder}",
            f"trainer={'cpu' if self.ranks == 1 else 'ddp_sim'}",
            f"trainer.max_epochs={self.epochs}",
            f"trainer.accumulate_grad_batches={self.accumulate}",
            "trainer.log_every_n_steps=1",
            "trainer.enable_progress_bar=false",
            f"data.workers={self.workers}",
            "policy=[stop,straight_through,random_freeze]",
            "logger=csv",
            "+logger.csv.flush_logs_every_n_steps=1",
            "callbacks=model_checkpoint",
            "~callbacks.model_checkpoint",
            f"+callbacks.last_checkpoint.every_n_train_steps={save_every}",
            # What is compared: the state at the end of the last epoch.
            "+callbacks.final._target_=lightning.pytorch.callbacks.ModelCheckpoint",
            "+callbacks.final.dirpath=${paths.output_dir}/checkpoints",
            "+callbacks.final.filename=final",
            "+callbacks.final.enable_version_counter=false",
            "+callbacks.final.save_on_train_epoch_end=true",
            "test=false",
            "extras.plan=false",
            "extras.print_config=false",
            "optimized_metric=null",
            *self.overrides,
        ]


def soak(setting: Setting, kills: int, folder: Path, *, save_every: int = 3, seed: int = 0) -> list[str]:
    """Compares a run that was killed with one that was left alone.

    Args:
        setting: What is run.
        kills: How often it is killed.
        folder: Where both runs write.
        save_every: Updates between two checkpoints.
        seed: Draws the moments.

    Returns:
        The differences, in words; empty where there is none.
    """
    alone = folder / "alone"
    began = time.monotonic()
    _finish(setting.command(alone, save_every), setting.ranks)
    length = time.monotonic() - began
    draw = random.Random(seed)
    done = lives = 0
    while done < kills:
        killed = folder / f"killed{lives}"
        while done < kills:
            moment = draw.uniform(0.05, 1.0) * length
            if _run(_resuming(setting.command(killed, save_every), killed), setting.ranks, moment):
                break
            done += 1
            print(f"killed {done} of {kills} after {moment:.1f} s of {length:.1f} s", flush=True)
        _finish(_resuming(setting.command(killed, save_every), killed), setting.ranks)
        found = differences(_end(alone), _end(killed)) + _log_differences(alone, killed)
        if found:
            return found
        lives += 1
    return []


def differences(first: Any, second: Any, place: str = "") -> list[str]:
    """The places in which two checkpoints differ, bit for bit, but for paths."""
    if any(word in place for word in VOLATILE):
        return []
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        same = first.dtype == second.dtype and torch.equal(first, second)
        return [] if same else [f"{place}: {_shown(first)} became {_shown(second)}"]
    if isinstance(first, Mapping) and isinstance(second, Mapping):
        keys = list(dict.fromkeys([*first, *second]))
        missing = [f"{place}.{key}: only in one of them" for key in keys if (key in first) != (key in second)]
        both = [key for key in keys if key in first and key in second]
        return missing + [
            line for key in both for line in differences(first[key], second[key], f"{place}.{key}")
        ]
    if isinstance(first, list | tuple) and isinstance(second, list | tuple) and len(first) == len(second):
        pairs = enumerate(zip(first, second, strict=True))
        return [line for index, (a, b) in pairs for line in differences(a, b, f"{place}[{index}]")]
    return [] if first == second else [f"{place}: {first!r} became {second!r}"]


# ---- running, killing


def _run(command: Sequence[str], ranks: int, kill_after: float | None) -> bool:
    """Runs ``train.py`` in forks, perhaps kills them; says whether it came to its end."""
    port = _free_port()
    with tempfile.TemporaryFile("w+") as told:
        children = [_fork(command, rank, ranks, port, told.fileno()) for rank in range(ranks)]
        deadline = None if kill_after is None else time.monotonic() + kill_after
        codes: dict[int, int] = {}
        while len(codes) < ranks:
            for child in children:
                if child not in codes:
                    found, status = os.waitpid(child, os.WNOHANG)
                    codes |= {child: os.waitstatus_to_exitcode(status)} if found else {}
            if deadline is not None and time.monotonic() > deadline:
                for child in children:
                    if child not in codes:
                        os.killpg(child, signal.SIGKILL)
                deadline = None
            time.sleep(0.01)
        failed = [code for code in codes.values() if code not in (0, -signal.SIGKILL)]
        if failed:
            told.seek(0)
            raise PolicyError(f"{' '.join(command)}\nfailed with exit codes {failed}:\n{told.read()}")
    return all(code == 0 for code in codes.values())


def _finish(command: Sequence[str], ranks: int) -> None:
    if not _run(command, ranks, None):
        raise PolicyError("the run was killed by somebody else")


def _fork(command: Sequence[str], rank: int, ranks: int, port: int, told: int) -> int:
    """Starts a rank in a process group of its own, so that its loader processes die with it.

    What it says on stderr goes to the file ``told``.
    """
    child = os.fork()
    if child:
        return child
    os.setpgid(0, 0)
    if ranks > 1:
        os.environ |= {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "soak",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
    code = 1
    os.dup2(told, 2)
    try:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.argv = [str(ROOT / "train.py"), *command]
        code = train(ROOT / "conf", command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def _resuming(command: list[str], folder: Path) -> list[str]:
    return [*command, "ckpt_path=last"] if list(folder.rglob("last*.ckpt")) else command


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


# ---- comparing


def _end(folder: Path) -> dict[str, Any]:
    loaded: dict[str, Any] = torch.load(folder / "checkpoints" / "final.ckpt", weights_only=True)
    return loaded


def _log_differences(first: Path, second: Path) -> list[str]:
    """Where the newest ``metrics.csv`` of the runs differ."""
    pairs = zip_longest(_logged(first), _logged(second))
    return [f"metrics.csv, row {row}: {a} became {b}" for row, (a, b) in enumerate(pairs, 1) if a != b]


def _logged(folder: Path) -> list[dict[str, str]]:
    newest = max(folder.rglob("metrics.csv"), key=lambda path: path.stat().st_mtime)
    with newest.open(newline="") as file:
        return list(csv.DictReader(file))


def _shown(tensor: Tensor) -> str:
    return f"{tuple(tensor.shape)} with sum {tensor.double().sum().item():.9g}"


def main(arguments: Sequence[str]) -> int:
    """Runs the program; the exit code is 1 where there was a difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--save-every", type=int, default=3, help="updates between two checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("overrides", nargs="*", help="more for the command line of train.py")
    parsed = parser.parse_args(arguments)
    setting = Setting(parsed.ranks, parsed.workers, parsed.accumulate, parsed.epochs, tuple(parsed.overrides))
    with tempfile.TemporaryDirectory() as folder:
        found = soak(setting, parsed.kills, Path(folder), save_every=parsed.save_every, seed=parsed.seed)
    print(
        "\n".join(found[:20])
        or f"{parsed.kills} kills, not one bit of difference: {json.dumps(vars(parsed))}"
    )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
