"""Compiles the Triton kernels for a GPU that need not be there, and prints what came of it as JSON.

python tests/optim/gpu/compile_kernels.py 90  (compute capability 9.0)
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import triton
from triton import language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gradpolicy.optim.gpu import kernels
from gradpolicy.optim.gpu.adam import WARPS

WORDS = re.compile(r"(?:ld|st)\.global[.\w]*")
USED = re.compile(r"REG:(\d+) STACK:(\d+)")
TOOL = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"


def kind(**other):
    plain = {"stored": tl.float32, "code": tl.int8, "aligned": True, "amsgrad": False, "coupled": False}
    return kernels.Kind(
        **{**plain, "many": False, "shared": True, "packed": False, "sparse": False, "columns": 0, **other}
    )


NUMBERS = ["factor", "decay", "shrink", "complement1", "beta2", "complement2", "epsilon", "step_size"]
NUMBERS += ["inverse_root"]
UPDATES = {
    "entries": kind(),
    "entries, many ages": kind(many=True, amsgrad=True, coupled=True),
    "few entries": kind(sparse=True),
    "held entries": kind(packed=True, aligned=False, many=True),
    "rows": kind(columns=1024),
    "held rows": kind(columns=1024, packed=True, many=True),
    "bfloat16": kind(stored=tl.bfloat16),
    "float64": kind(stored=tl.float64, shared=False, many=True),
}
FLAGS = "*u8"
MOVES = {
    "move_many": {"table": "*i64", "TYPE": tl.int32, "FROM_ALL": False, "TO_ALL": False, "JOBS": 4},
    "index_many": {"table": "*i64", "seen": "*i64", "COMPARED": True, "BELOW_ZERO": False}
    | {"JOBS": 4, "ALIGNED": True},
    "survey": {
        "flags": FLAGS,
        "codes": "*i8",
        "result": "*i64",
        "size": "i32",
        "COMPARED": True,
    },
    "recode": {"codes": "*i8", "flags": FLAGS, "table": "*i8", "result": "*i8", "size": "i32", "width": "i32"}
    | {"OLD_BITS": 8},
    "clear_many": {
        "table": "*i64",
        "TYPE": tl.int32,
        "CODE": tl.int8,
        "BITS": False,
        "SINGLE": True,
        "JOBS": 4,
        "ALIGNED": True,
    },
    "survey_many": {"table": "*i64", "result": "*i64", "JOBS": 4, "ALIGNED": True},
    "recode_many": {"table": "*i64", "by_code": "*i8", "width": "i32", "JOBS": 4, "ALIGNED": True},
}


def built(name, arguments, warps, capability):
    """Registers, bytes of stack (what did not fit into registers) and the memory instructions of a kernel."""
    names = list(arguments)
    constants = {(names.index(key),): value for key, value in arguments.items() if not isinstance(value, str)}
    signature = {
        key: "constexpr" if not isinstance(value, str) else value for key, value in arguments.items()
    }
    even = [key for key, value in signature.items() if value.startswith("*") or key == "size"]
    attributes = {(names.index(key),): [["tt.divisibility", 16]] for key in even}
    kernel = getattr(kernels, name)
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, 32)
    made = triton.compile(source, target=target, options={"num_warps": warps})
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(made.asm["cubin"])
        found = subprocess.run(
            [TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    registers, stack = map(int, USED.search(found.stdout).groups())
    words = WORDS.findall(made.asm["ptx"])
    return {"registers": registers, "stack": stack, "words": {word: words.count(word) for word in set(words)}}


def main(capability):
    results = {}
    for name, own in UPDATES.items():
        arguments = {
            "table": "*i64",
            "moving": "*u8",
            "corrections_at": "i32",
            **dict.fromkeys(NUMBERS, "fp32"),
        }
        kernel = "adam_rows" if own.columns else "adam_entries"
        results[name] = built(kernel, {**arguments, "KIND": own, "JOBS": 4}, WARPS, capability)
    for name, arguments in MOVES.items():
        results[name] = built(name, arguments, 4, capability)
    print(json.dumps(results))


if __name__ == "__main__":
    main(int(sys.argv[1]))
