"""Runs ``train.py`` in forks of this process, and kills it."""

import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import torch
from lightning.pytorch.utilities import rank_zero_only
from torch.distributed import TCPStore  # type: ignore[attr-defined]

# Everything that a run imports is imported once here; each run is a fork.
import gradpolicy.app.run  # noqa: F401
from gradpolicy.app import Exit
from gradpolicy.app.launch import main as train
from gradpolicy.errors import PolicyError

# A fork of a process with OpenMP threads would hang at its first parallel loop.
torch.set_num_threads(1)

ROOT = Path(__file__).resolve().parents[2]


def run(
    command: Sequence[str], ranks: int, after: float | None = None, number: signal.Signals = signal.SIGKILL
) -> bool:
    """Run ``train.py``; return True if it ended by itself.

    Args:
        command: Its command line.
        ranks: The number of processes.
        after: The seconds after which they are killed; None: they are not.
        number: The signal that kills them; with SIGKILL their loader processes get it, too.

    Raises:
        PolicyError: If it failed.
    """
    # The ranks agree on the run's directory by a store, as of torchrun's agent.
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if ranks > 1 else None
    killed, began, codes = False, time.monotonic(), dict[int, int]()
    with tempfile.TemporaryFile("w+") as errors:
        children = [_fork(command, rank, ranks, store, errors.fileno()) for rank in range(ranks)]
        while len(codes) < ranks:
            for child in children:
                found, status = (0, 0) if child in codes else os.waitpid(child, os.WNOHANG)
                codes |= {child: os.waitstatus_to_exitcode(status)} if found else {}
            if after is not None and not killed and time.monotonic() > began + after:
                killed = True
                for child in set(children) - codes.keys():
                    (os.killpg if number is signal.SIGKILL else os.kill)(child, number)
            time.sleep(0.005)
        ends = (0, *((-signal.SIGKILL, -signal.SIGTERM, Exit.TERMINATED) if killed else ()))
        if failed := [code for code in codes.values() if code not in ends]:
            errors.seek(0)
            words = f"failed with exit codes {failed}:\n{errors.read()}"
            raise PolicyError(f"{' '.join(command)}\n{words}")
    return not any(codes.values())


def _fork(command: Sequence[str], rank: int, ranks: int, store: TCPStore | None, errors: int) -> int:
    """Start a rank in its own process group, so that its loader processes are killed with it."""
    child = os.fork()
    # Both processes do this, since either may need it first.
    with suppress(OSError):
        os.setpgid(child, child)
    if child:
        return child
    if store is not None:
        os.environ |= {
            **dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank)),
            **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(ranks)),
            "GROUP_RANK": "0",
            "TORCHELASTIC_RUN_ID": "soak",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(store.port),
        }
        # Lightning reads it on import, which a process of torchrun would do itself.
        rank_zero_only.rank = rank  # type: ignore[attr-defined]
    code = 1
    os.dup2(errors, 2)
    try:
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        sys.argv = [str(ROOT / "train.py"), *command]
        code = train(ROOT / "conf", command)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def checkpoints(outputs: Path) -> list[Path]:
    """Return the checkpoints from which a killed run can be resumed."""
    return list(outputs.glob("train/runs/*/checkpoints/last*.ckpt"))
