"""Hypothesis strategies of data files: damaged, wrong inside, with code in them, or links and pipes."""

import copy
import io
import json
import os
import pickle
import zipfile
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from PIL import Image

import gradpolicy as gp
from fuzzing.running import ACCEPTED, REFUSED, Case, Content
from gradpolicy.app.launch import main as train
from gradpolicy.errors import PolicyError
from gradpolicy.insight import record, report

Files = Mapping[str, bytes]
Action = Callable[[], object]
Changed = tuple[str, Content, str]
"""A description, the changed file, and the only right result."""
CONF = Path(__file__).resolve().parents[2] / "conf"
SHORT = (
    *("trainer=cpu", "logger=csv", "callbacks=[model_checkpoint,record]", "extras.plan=false", "test=false"),
    *("trainer.max_epochs=1", "trainer.limit_train_batches=1", "trainer.limit_val_batches=1"),
    *("trainer.limit_test_batches=1", "trainer.enable_progress_bar=false", "model.model.width=2"),
)
GARBAGE: tuple[Any, ...] = (
    *(None, -1, 10**18, 1.5, 1e30, float("nan"), "abc", "999.0.0"),
    *([], [1], {}, {"a": 1}),
)
DTYPES = (torch.float64, torch.float16, torch.int8, torch.bool, torch.complex64)
SHELL = "touch canary"


class Evil:
    """Calls a function when it is unpickled."""

    def __init__(self, function: Callable[[str], object], argument: str) -> None:
        self.call = function, (argument,)

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


EVIL = (Evil(os.system, SHELL), Evil(exec, "open('canary', 'w').close()"), Evil(__import__, "stranger"))


def run(*words: str) -> None:
    """Run the program; a refusal is raised as by the functions.

    Raises:
        PolicyError: If it ends with code 2.
        RuntimeError: If it ends with another error.
    """
    said = io.StringIO()
    with redirect_stderr(said), redirect_stdout(io.StringIO()):
        code = train(CONF, [*SHORT, *words, "paths.log_dir=out"])
    errors = [line for line in said.getvalue().splitlines() if line and not line.startswith("warning:")]
    if code == 2:
        raise PolicyError("\n".join(errors).removeprefix("error: "))
    if code or errors:
        raise RuntimeError(f"exit code {code}: {errors}")


def state() -> dict[str, torch.Tensor]:
    """Return the weights to which deltas and adapters belong."""
    return {"a.weight": torch.arange(24.0).reshape(6, 4), "b.bias": torch.ones(3)}


def merge() -> None:
    """Merge a delta with itself, and turn the result into an adapter."""
    gp.delta.merge(["delta"] * 2, [0.5, 0.5], "out/merged")
    gp.delta.to_peft("out/merged", "out/adapter")


READERS: dict[str, tuple[Action, ...]] = {
    "checkpoint": (
        # Most cases only read the file; the others take a run.
        *[lambda: run("ckpt_path=checkpoint", "plan_only=true")] * 5,
        lambda: run("ckpt_path=checkpoint", "trainer.max_epochs=2"),
        lambda: run("ckpt_path=checkpoint", "train=false", "test=true"),
        lambda: run("callbacks=initial_weights", "callbacks.initial_weights.path=checkpoint"),
    ),
    "run": (lambda: record.load("run"), lambda: report.write([Path("run")], Path("out/report.html"))),
    "delta": (
        lambda: gp.delta.info("delta"),
        lambda: gp.delta.apply(state(), "delta"),
        lambda: gp.delta.revert(state(), "delta"),
        merge,
    ),
    "adapter": (
        lambda: gp.delta.from_peft("adapter", "out/delta"),
        lambda: gp.delta.from_peft("adapter", "out/delta", state()),
    ),
}
DAMAGED = ("checkpoint", "delta")
"""The kinds of files whose damage is noticed in every case."""


def prepare(folder: Path) -> dict[str, Files]:
    """Write files of each kind, and return their contents; what is imported meanwhile, forks need not."""
    changed = {**state(), "a.weight": state()["a.weight"].index_fill(0, torch.tensor([1, 4]), 7.0)}
    with chdir(folder):
        run("hydra.run.dir=run", "extras.plan=true", "trainer.log_every_n_steps=1")
        run("plan_only=true")
        Path("run/pictures").mkdir()
        Image.new("L", (2, 2)).save("run/pictures/image.png")
        run("ckpt_path=run/checkpoints/last.ckpt", "callbacks=default", "plan_only=true")
        report.write([Path("run")], Path("out.html"))
        gp.delta.save("delta", changed, state())
        gp.delta.to_peft("delta", "adapter")
        gp.delta.from_peft("adapter", "again", state())
        found = {path: path.read_bytes() for path in sorted(Path().rglob("*")) if path.is_file()}
    kinds = {"delta": "delta", "adapter": "adapter", "run": "run"}
    files = {kind: {str(p): data for p, data in found.items() if p.parts[0] == kinds[kind]} for kind in kinds}
    # A config is code.
    kept = {".jsonl", ".json", ".csv", ".png", ".txt", ".log"}
    files["run"] = {name: data for name, data in files["run"].items() if Path(name).suffix in kept}
    return {"checkpoint": {"checkpoint": found[Path("run/checkpoints/last.ckpt")]}, **files}


@st.composite
def cases(draw: st.DrawFn, material: Mapping[str, Files]) -> Case:
    """Draw a kind of data, and one of its files to damage."""
    kind = draw(st.sampled_from(sorted(material)))
    files: dict[str, Content] = {**material[kind]}
    name = draw(st.sampled_from(sorted(files)))
    content = material[kind][name]
    ways = [unchanged, damaged, flipped, wrong_inside, no_file]
    way = draw(st.sampled_from(ways))
    what, files[name], must = draw(way(kind, content))
    # An accepted adapter or delta need not fit every reader.
    action = draw(st.sampled_from(READERS[kind][: 1 if must == ACCEPTED else None]))
    return Case(f"{name}: {what}", action, must, files)


def unchanged(kind: str, content: bytes) -> SearchStrategy[Changed]:
    """Return the strategy of the file as it is."""
    return st.just(("unchanged", content, ACCEPTED))


@st.composite
def damaged(draw: st.DrawFn, kind: str, content: bytes) -> Changed:
    """Draw another file, or a part of the file."""
    noise = draw(st.binary(min_size=64, max_size=256))
    place = draw(st.integers(1, max(len(content) - 1, 1)))
    evil = pickle.dumps({"state_dict": {}, "more": EVIL}, protocol=2)
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as members:
        members.writestr("archive/data.pkl", evil)
    ways = {
        "truncated": content[: place - 1],
        "bytes at the end": content + noise,
        "bytes at the beginning": noise + content,
        "bytes taken out": content[: place - 1] + content[place + 64 :],
        "empty": b"",
        "noise": noise,
        "the beginning of a ZIP archive": b"PK\x03\x04" + noise,
        "a pickle that runs code": evil,
        "an archive with a pickle that runs code": archive.getvalue(),
        "JSON that never ends": b"[" * 100_000,
    }
    what = draw(st.sampled_from(sorted(ways)))
    return what, ways[what], REFUSED if kind in DAMAGED else ""


@st.composite
def flipped(draw: st.DrawFn, kind: str, content: bytes) -> Changed:
    """Draw a bit to flip."""
    place = draw(st.integers(0, max(len(content) - 1, 0)))
    changed = bytearray(content or b" ")
    changed[place] ^= 1 << draw(st.integers(0, 7))
    return f"a flipped bit at {place}", bytes(changed), ""


@st.composite
def no_file(draw: st.DrawFn, kind: str, content: bytes) -> Changed:
    """Draw a pipe, or in a run directory a link out of it."""
    what: Content = draw(st.sampled_from(("a link", "a pipe"))) if kind == "run" else "a pipe"
    return str(what), what, REFUSED if kind in DAMAGED else ""


@st.composite
def wrong_inside(draw: st.DrawFn, kind: str, content: bytes) -> Changed:
    """Draw a value to replace, at any depth: in a checkpoint, the header of safetensors, or lines of JSON."""
    if kind == "checkpoint":
        tree = torch.load(io.BytesIO(content), weights_only=True)
        what, evil = draw(_replaced(tree, (*GARBAGE, *EVIL, torch.zeros(3)), weights=tree["state_dict"]))
        buffer = io.BytesIO()
        torch.save(tree, buffer, _use_new_zipfile_serialization=draw(st.booleans()))
        return what, buffer.getvalue(), REFUSED if evil else ""
    start = 8 + int.from_bytes(content[:8], "little")
    if content[8:9] == b"{" and start <= len(content):
        tree = json.loads(content[8:start])
        what, _ = draw(_replaced(tree, GARBAGE))
        header = json.dumps(tree).encode()
        return what, len(header).to_bytes(8, "little") + header + content[start:], ""
    lines = content.split(b"\n") if content[:2] == b'{"' else [content]
    line = draw(st.integers(0, len(lines) - 1))
    try:
        tree = [json.loads(lines[line])]
    except ValueError:
        return draw(damaged(kind, content))
    what, _ = draw(_replaced(tree, GARBAGE))
    lines[line] = json.dumps(tree[0]).encode()
    return what, b"\n".join(lines), ""


@st.composite
def _replaced(
    draw: st.DrawFn, tree: Any, garbage: tuple[Any, ...], weights: dict[str, Any] | None = None
) -> tuple[str, bool]:
    """Replace a value in a tree, and return a description, and if the new one runs code."""
    if weights and draw(st.booleans()):
        name = draw(st.sampled_from(sorted(weights)))
        weight = weights[name]
        ways = [
            weight.new_zeros(*weight.shape, 2),
            weight.new_zeros(0),
            weight.to_sparse(),
            weight * torch.nan,
        ]
        weights[name] = draw(st.sampled_from([*ways, *(weight.to(dtype) for dtype in DTYPES)]))
        return f"another {name}", False
    below, key, path = tree, draw(st.sampled_from(_keys(tree))), []
    while isinstance(below[key], dict | list) and below[key] and draw(st.integers(0, 5)):
        path.append(str(key))
        below = below[key]
        key = draw(st.sampled_from(_keys(below)))
    new = draw(st.sampled_from(garbage))
    if isinstance(below, dict) and draw(st.integers(0, 3)) == 0:
        del below[key]
        return f"nothing at {'.'.join([*path, str(key)])[:80]}", False
    below[key] = copy.deepcopy(new) if not isinstance(new, Evil) else new
    return f"{new!r} at {'.'.join([*path, str(key)])[:80]}", isinstance(new, Evil)


def _keys(tree: Any) -> list[Any]:
    return sorted(tree, key=str) if isinstance(tree, dict) else list(range(len(tree)))
