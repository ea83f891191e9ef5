"""The command `gradpolicy`, also run by ``python -m gradpolicy`` and `train.py`.

Only the standard library is imported here; the modules of a subcommand are imported once it is known.
"""

import importlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from gradpolicy.errors import PolicyError, brief, unknown
from gradpolicy.imports import EXTRAS

CONFIGS = Path(__file__).parents[1] / "conf"
# The modules of subcommands with their own arguments.
COMMANDS = {
    "delta": "gradpolicy.app.delta",
    "init": "gradpolicy.app.init",
    "plan": "gradpolicy.app.launch",
    "report": "gradpolicy.app.report",
    "resume": "gradpolicy.app.resume",
    "sweep": "gradpolicy.app.sweep",
}
# Subcommands that read configs, and so get their directory.
READ_CONFIGS = ("resume", "sweep")
INTERRUPTED = 130


def main(arguments: Sequence[str] | None = None, config_dir: Path | None = None) -> int:
    """Run a subcommand, or train if none is named.

    Args:
        arguments: The command line; default: that of this process.
        config_dir: The directory of configs; default: those of the package.

    Returns:
        The exit code: 0, 1 for a failure, 2 for invalid input, 3 for a violated guarantee, 130 for Ctrl-C,
        143 for SIGTERM.
    """
    # Spinning threads took four times as long on a busy machine. Read when torch is loaded.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        return _imported_command(words, (config_dir or CONFIGS).resolve())()
    except PolicyError as error:
        print(f"error: {brief(str(error), most=500)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _imported_command(words: Sequence[str], config_dir: Path) -> Callable[[], int]:
    """Import the module of the subcommand.

    Raises:
        PolicyError: If there is no such subcommand, or one of its packages is not installed.
    """
    first, rest = (words[0], words[1:]) if words else ("", [])
    names_command = first.isidentifier()
    if names_command and first not in COMMANDS:
        raise unknown("command", brief(first), COMMANDS, key="gradpolicy")
    try:
        run = importlib.import_module(COMMANDS.get(first, "gradpolicy.app.launch")).main
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        extra = EXTRAS.get(missing, "train")
        raise PolicyError(
            f"gradpolicy: needs {missing}, which is not installed: pip install 'gradpolicy[{extra}]'"
        ) from error
    if not names_command:
        return lambda: run(config_dir, words)
    if first == "plan":
        return lambda: run(config_dir, [*rest, "plan_only=true"])
    if first in READ_CONFIGS:
        return lambda: run(rest, config_dir)
    return lambda: run(rest)
