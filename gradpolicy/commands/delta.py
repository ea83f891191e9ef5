"""The command ``gradpolicy delta``: files of what changed, without writing Python."""

import argparse
from collections.abc import Sequence

from gradpolicy.delta.apply_delta import apply, revert
from gradpolicy.delta.file import check_replaceable
from gradpolicy.delta.info import info
from gradpolicy.delta.merge import merge
from gradpolicy.delta.save import save
from gradpolicy.delta.weights import read_weights, write_weights
from gradpolicy.display import wide_console

WRITTEN = "the file that is written; only a delta is ever replaced"
WEIGHTS = "a .safetensors file, or a checkpoint of torch.save or Lightning"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Args:
        arguments: What follows ``gradpolicy delta``.

    Raises:
        PolicyError: For wrong input.
    """
    options = _parser().parse_args(arguments)
    console = wide_console()
    match options.action:
        case "info":
            console.print(info(options.delta))
        case "save":
            check_replaceable(options.out)
            console.print(save(options.out, read_weights(options.model), read_weights(options.base)))
        case "merge":
            weights = options.weights or [1.0] * len(options.deltas)
            console.print(merge(options.deltas, weights, options.out))
        case action:
            check_replaceable(options.out, None)
            weights = read_weights(options.model)
            (apply if action == "apply" else revert)(weights, options.delta)
            write_weights(options.out, weights)
            console.print(f"wrote {options.out}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradpolicy delta", description="Files of what a training changed (docs/delta.md)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    each = actions.add_parser("info", help="what a file holds")
    each.add_argument("delta", metavar="DELTA")
    each = actions.add_parser("save", help="write what MODEL and BASE differ in")
    each.add_argument("model", metavar="MODEL", help=WEIGHTS)
    each.add_argument("base", metavar="BASE", help="the same before the training")
    each.add_argument("--out", required=True, metavar="FILE", help=WRITTEN)
    for name, text in (("apply", "take a base to what DELTA says"), ("revert", "take it back, bit for bit")):
        each = actions.add_parser(name, help=text)
        each.add_argument("model", metavar="MODEL", help=WEIGHTS)
        each.add_argument("delta", metavar="DELTA")
        each.add_argument("--out", required=True, metavar="FILE", help="a new .safetensors file")
    each = actions.add_parser("merge", help="put several files of one base together")
    each.add_argument("deltas", metavar="DELTA", nargs="+")
    each.add_argument("--weights", type=float, nargs="+", help="a number for each file; 1 unless given")
    each.add_argument("--out", required=True, metavar="FILE", help=WRITTEN)
    return parser
