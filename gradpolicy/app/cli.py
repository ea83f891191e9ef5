"""The command `gradpolicy`: its subcommands, their arguments, and what they call.

``python -m gradpolicy`` and `train.py` run it too. Only the standard library is imported here; a subcommand
imports what it needs once its arguments are known.
"""

import argparse
import inspect
import io
import keyword
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from gradpolicy.app import CONFIGS, Exit
from gradpolicy.errors import PolicyError, brief, shown, unknown
from gradpolicy.imports import EXTRAS

STARTER = Path(__file__).parent / "starter"
# The package of the starter project, which is renamed after the directory.
PACKAGE = "my_project"


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
    replace_unencodable()
    words = list(sys.argv[1:] if arguments is None else arguments)
    configs = (config_dir or CONFIGS).resolve()
    try:
        try:
            return _run(words, configs)
        finally:
            sys.stdout.flush()
    except PolicyError as error:
        print(f"error: {brief(str(error), most=500)}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return Exit.INTERRUPTED
    except BrokenPipeError:
        # As of `| head`. What Python still writes at its end goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.FAILED


def _run(words: Sequence[str], configs: Path) -> int:
    if words == ["--version"]:
        print(f"gradpolicy {sys.modules['gradpolicy'].__version__}")
        return 0
    if "query=" in " ".join(words) and {"-sc", "--shell-completion"} & set(words):
        # Hydra completes overrides; the first word may be a command.
        line = os.environ.get("COMP_LINE", "").split(" ")
        if all(word.endswith(".py") for word in line[1:-1]):
            print(*(name for name in COMMANDS if name.startswith(line[-1])), sep="\n")
    if not (words and words[0].isidentifier()):
        return train(words, configs)
    if words[0] not in COMMANDS:
        raise unknown("command", brief(words[0]), COMMANDS, key="gradpolicy")
    return COMMANDS[words[0]](words[1:], configs)


def replace_unencodable() -> None:
    """Print ``?`` for characters that the encoding of an output stream does not have."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


@contextmanager
def extras_named() -> Iterator[None]:
    """Name the extra of a package that the imports in the block lack."""
    try:
        yield
    except ModuleNotFoundError as error:
        missing = str(error.name).split(".")[0]
        install = f"pip install 'gradpolicy[{EXTRAS.get(missing, 'train')}]'"
        raise PolicyError(f"gradpolicy: needs {missing}, which is not installed: {install}") from error


def parser_of(command: Callable[..., int]) -> argparse.ArgumentParser:
    """Return a parser without arguments, which describes a subcommand by its docstring."""
    return argparse.ArgumentParser(
        prog=f"gradpolicy {command.__name__}",
        description=inspect.getdoc(command),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


# ---- subcommands that read configs


def train(words: Sequence[str], configs: Path) -> int:
    """Train a model; what follows are Hydra's options and overrides."""
    with extras_named():
        from gradpolicy.app import launch
    return launch.main(configs, words)


def plan(words: Sequence[str], configs: Path) -> int:
    """Show what each policy affects; nothing is trained. What follows are the overrides of a run."""
    parser_of(plan).parse_known_args(words)
    return train([*words, "plan_only=true"], configs)


def resume(words: Sequence[str], configs: Path) -> int:
    """Resume a run, with its original command line."""
    parser = parser_of(resume)
    parser.add_argument(
        "words", nargs="*", metavar="RUN, OVERRIDE", help="its directory; overrides to change"
    )
    given = parser.parse_args(words).words
    with extras_named():
        from gradpolicy.app.resume import command_of
    runs, changes = [word for word in given if "=" not in word], [word for word in given if "=" in word]
    return train(command_of(runs, changes), configs)


def sweep(words: Sequence[str], configs: Path) -> int:
    """Search the space of a sweep config with Optuna.

        gradpolicy sweep sweep=learning_rate --trials 20
        gradpolicy sweep sweep=learning_rate --trials 20 trainer.max_epochs=5    # any override of a run

    The study is in an sqlite file: run the same command again to continue it, run it twice at the same time
    to search with two processes, open it with `optuna-dashboard sqlite:///outputs/study.db`. Ctrl-C and
    SIGTERM stop the search: the current trial counts as failed, and the next call starts with its values.
    """
    parser = parser_of(sweep)
    parser.add_argument("overrides", nargs="*", help="sweep=NAME of conf/sweep, and overrides of a run")
    parser.add_argument(
        "--trials", type=int, default=20, help="the total number of trials, including earlier ones"
    )
    parser.add_argument("--directory", default="outputs", help="the directory of the trials and the study")
    parser.add_argument("--seed", type=int, default=0, help="the seed of the sampler")
    options = parser.parse_intermixed_args(words)
    with extras_named():
        from gradpolicy.app.sweep import search
    return search(configs, options.overrides, Path(options.directory), options.trials, options.seed)


# ---- others


def init(words: Sequence[str], configs: Path) -> int:
    """Write a small project: a model, data, two policies and a test.

    gradpolicy init my_project
    cd my_project && python train.py && python -m pytest
    """
    parser = parser_of(init)
    parser.add_argument("directory", metavar="DIR", type=Path, help="the project's directory, new or empty")
    directory = parser.parse_args(words).directory.expanduser()
    write_project(directory)
    print(f"Wrote {directory}; next:\n  cd {directory}\n  python train.py\nSee README.md for the next steps.")
    return 0


def write_project(directory: Path) -> None:
    """Write the starter project.

    Args:
        directory: The directory, whose name becomes that of the project's package.

    Raises:
        PolicyError: If the directory is not empty, or its name is not a valid package name.
    """
    name = directory.absolute().name.replace("-", "_")
    if not name.isidentifier() or keyword.iskeyword(name):
        raise PolicyError(f"DIR: {shown(name)} cannot be the name of a package; use letters, digits and _")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PolicyError(f"DIR: {directory} is not empty; name a new directory")
    for source in sorted(STARTER.rglob("*")):
        if source.is_file() and source.suffix != ".pyc":
            target = directory / str(source.relative_to(STARTER)).replace(PACKAGE, name)
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(source.read_text("utf-8").replace(PACKAGE, name), "utf-8")


def report(words: Sequence[str], configs: Path) -> int:
    """Write the report of one or several runs.

        gradpolicy report last                      # the newest run below outputs
        gradpolicy report outputs/train/runs/DATE
        gradpolicy report outputs/train/multiruns/DATE/* --output sweep.html

    A directory of run directories means all of these. The report is one HTML file, which opens offline.
    """
    parser = parser_of(report)
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a run directory, or a directory of them")
    parser.add_argument(
        "--output",
        metavar="FILE",
        help="the file to write (default: report.html in the run directory; of several, their common one)",
    )
    options = parser.parse_args(words)
    with extras_named():
        import gradpolicy.insight.report.page  # noqa: F401
        from gradpolicy.checks import check_free
        from gradpolicy.insight.report import REPORT, is_report, write
    runs = runs_below([Path(given).expanduser() for given in options.runs])
    common = runs[0] if len(runs) == 1 else Path(os.path.commonpath([run.parent for run in runs]))
    output = Path(options.output).expanduser() if options.output else common / REPORT
    check_free("--output", output, "report of gradpolicy", is_report)
    print(f"Saved in {write(runs, output)}")
    return 0


def runs_below(given: Sequence[Path]) -> list[Path]:
    """Return the run directories at or below some paths, each once.

    Raises:
        PolicyError: For a path that neither is nor contains a run directory.
    """
    from gradpolicy.insight.report import looks_like_run

    found: list[Path] = []
    for path in given:
        newest = str(path) == "last" and not path.exists()
        configs = [*(Path("outputs") if newest else path).rglob("config.yaml")]
        below = sorted(each.parent for each in configs if each.parent.name != ".hydra")
        if newest and below:
            path = max(below, key=lambda run: (run / "config.yaml").stat().st_mtime)
        if not (looks_like_run(path) or below):
            raise PolicyError(f"RUN: {path} is no run directory and no directory of them")
        found += [path] if looks_like_run(path) else below
    return list(dict.fromkeys(path.absolute() for path in found))


def delta(words: Sequence[str], configs: Path) -> int:
    """Read and write files of the weights that training changed (docs/delta.md)."""
    options = _delta_parser().parse_args(words)
    with extras_named():
        from gradpolicy import delta as files
        from gradpolicy.delta.file import check_replaceable, read_weights, write_weights
        from gradpolicy.display import wide_console
    told: object = None
    match options.action:
        case "info":
            told = files.info(options.delta)
        case "save":
            model, base = read_weights(options.model), read_weights(options.base)
            told = files.save(options.out, model, base, replaces=options.replaces)
        case "merge":
            factors = options.weights or [1.0] * len(options.deltas)
            told = files.merge(options.deltas, factors, options.out)
        case "to-peft":
            files.to_peft(options.delta, options.out)
        case "from-peft":
            weights = read_weights(options.base) if options.base else None
            told = files.from_peft(options.directory, options.out, weights)
        case action:
            check_replaceable(options.out, None)
            model = read_weights(options.model)
            (files.apply if action == "apply" else files.revert)(model, options.delta)
            write_weights(options.out, model)
    wide_console().print(told or f"wrote {options.out}", highlight=told is not None)
    return 0


def _delta_parser() -> argparse.ArgumentParser:
    """Return the parser of the actions on deltas: what each reads, and what it writes."""
    parser = parser_of(delta)
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    weights = "a .safetensors file, or a checkpoint of torch.save or Lightning"
    helps = {"model": weights, "base": "the same, before training"}
    written, new = "the output file; only a delta is ever replaced", "a new .safetensors file"
    parsers = {}
    for action, text, reads, writes in (
        ("info", "show the content of a file", ["delta"], ""),
        ("save", "write the differences of MODEL and BASE", ["model", "base"], written),
        ("apply", "apply DELTA to its base", ["model", "delta"], new),
        ("revert", "revert it, bit for bit", ["model", "delta"], new),
        ("merge", "merge several files of one base", [], written),
        ("to-peft", "write DELTA as an adapter of PEFT", ["delta"], "a new or empty directory"),
        ("from-peft", "write an adapter of PEFT as a delta", ["directory"], written),
    ):
        parsers[action] = each = actions.add_parser(action, help=text)
        for name in reads:
            each.add_argument(name, metavar=name.upper(), help=helps.get(name))
        if writes:
            each.add_argument("--out", required=True, metavar="PATH", help=writes)
    parsers["save"].add_argument(
        "--replaces", nargs="+", default=(), metavar="GLOB", help="save these in full"
    )
    parsers["merge"].add_argument("deltas", metavar="DELTA", nargs="+")
    parsers["merge"].add_argument("--weights", type=float, nargs="+", help="a number each; default: 1")
    parsers["from-peft"].add_argument("--base", help="the weights without it, unless to-peft wrote it")
    return parser


COMMANDS: dict[str, Callable[[Sequence[str], Path], int]] = {
    command.__name__: command for command in (delta, init, plan, report, resume, sweep)
}
