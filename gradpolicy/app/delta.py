"""The command ``gradpolicy delta``: delta files without writing Python."""

import argparse
from collections.abc import Sequence

from gradpolicy.delta.apply_delta import apply, revert
from gradpolicy.delta.file import check_replaceable, read_weights, write_weights
from gradpolicy.delta.info import info
from gradpolicy.delta.merge import merge
from gradpolicy.delta.peft_adapter import from_peft, to_peft
from gradpolicy.delta.save import save
from gradpolicy.display import wide_console

WRITTEN = "the output file; only a delta is ever replaced"
WEIGHTS = "a .safetensors file, or a checkpoint of torch.save or Lightning"


def main(arguments: Sequence[str]) -> int:
    """Run the command, and return its exit code.

    Args:
        arguments: The arguments after ``gradpolicy delta``.

    Raises:
        PolicyError: For invalid input.
    """
    options = _parser().parse_args(arguments)
    console = wide_console()
    match options.action:
        case "info":
            console.print(info(options.delta))
        case "save":
            model, before = read_weights(options.model), read_weights(options.base)
            console.print(save(options.out, model, before, replaces=options.replaces))
        case "merge":
            factors = options.weights or [1.0] * len(options.deltas)
            console.print(merge(options.deltas, factors, options.out))
        case "to-peft":
            to_peft(options.delta, options.out)
            console.print(f"wrote {options.out}", highlight=False)
        case "from-peft":
            weights = read_weights(options.base) if options.base else None
            console.print(from_peft(options.directory, options.out, weights))
        case action:
            check_replaceable(options.out, None)
            model = read_weights(options.model)
            (apply if action == "apply" else revert)(model, options.delta)
            write_weights(options.out, model)
            console.print(f"wrote {options.out}", highlight=False)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gradpolicy delta", description="Files of the weights that training changed (docs/delta.md)."
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    each = actions.add_parser("info", help="show the content of a file")
    each.add_argument("delta", metavar="DELTA")
    each = actions.add_parser("save", help="write the differences of MODEL and BASE")
    each.add_argument("model", metavar="MODEL", help=WEIGHTS)
    each.add_argument("base", metavar="BASE", help="the same, before training")
    each.add_argument("--replaces", nargs="+", default=(), metavar="GLOB", help="tensors to save in full")
    each.add_argument("--out", required=True, metavar="FILE", help=WRITTEN)
    for name, text in (("apply", "apply DELTA to its base"), ("revert", "revert it, bit for bit")):
        each = actions.add_parser(name, help=text)
        each.add_argument("model", metavar="MODEL", help=WEIGHTS)
        each.add_argument("delta", metavar="DELTA")
        each.add_argument("--out", required=True, metavar="FILE", help="a new .safetensors file")
    each = actions.add_parser("merge", help="merge several files of one base")
    each.add_argument("deltas", metavar="DELTA", nargs="+")
    each.add_argument("--weights", type=float, nargs="+", help="a number for each file; default: 1")
    each.add_argument("--out", required=True, metavar="FILE", help=WRITTEN)
    each = actions.add_parser("to-peft", help="write DELTA as an adapter of PEFT")
    each.add_argument("delta", metavar="DELTA")
    each.add_argument("--out", required=True, metavar="DIRECTORY", help="a new or empty directory")
    each = actions.add_parser("from-peft", help="write an adapter of PEFT as a delta")
    each.add_argument("directory", metavar="DIRECTORY")
    each.add_argument("--base", metavar="BASE", help="the weights without it, unless to-peft wrote it")
    each.add_argument("--out", required=True, metavar="FILE", help=WRITTEN)
    return parser
