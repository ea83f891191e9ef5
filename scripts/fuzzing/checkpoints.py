"""Hypothesis strategies of checkpoints, as files and as directories of shards."""

import copy
import io
import pickle
import zipfile
from collections.abc import Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzzing.case import ACCEPT, EITHER, REFUSE, SHORT, Case, Expectation, command
from fuzzing.dangers import EVIL_PICKLE, FILES, RunsWhenRead, WritesWhenRead, archive
from fuzzing.running import Program

GIVEN = "given.ckpt"
# A small model makes a small file.
MODEL = "model.model.width=2"
LOOK = command(f"ckpt_path={GIVEN}", MODEL)
TEST = command(f"ckpt_path={GIVEN}", "train=false", MODEL, base=SHORT)
RESUME = command(f"ckpt_path={GIVEN}", "trainer.max_epochs=2", "test=false", MODEL, base=SHORT)
START = command(
    "callbacks=initial_weights", f"callbacks.initial_weights.path={GIVEN}", "test=false", MODEL, base=SHORT
)
# Most cases only read the file; the others take a run.
USES = st.sampled_from((*(LOOK,) * 5, TEST, RESUME, START))
GARBAGE: tuple[Any, ...] = (
    None,
    -1,
    10**18,
    "abc",
    "999.0.0",
    1.5,
    float("nan"),
    [],
    [1],
    {},
    {"a": 1},
    torch.zeros(3),
)
KINDS = (torch.float64, torch.float16, torch.int8, torch.bool, torch.complex64)


@dataclass(frozen=True)
class Material:
    """Checkpoints of one short run.

    Attributes:
        file: A checkpoint in one file.
        shards: The files of a checkpoint that is a directory.
    """

    file: bytes
    shards: Mapping[str, bytes]


def prepare(program: Program, folder: Path) -> Material:
    """Train for one batch in this process and plan the default job, so that forks need no imports."""
    sharded = command("trainer=fsdp2", "trainer.accelerator=cpu", MODEL, "hydra.run.dir=shards", base=SHORT)
    lines = (
        command(MODEL, "extras.plan=true", "hydra.run.dir=run", base=SHORT),
        command(MODEL, "callbacks=default"),
        ("plan_only=true",),
        sharded,
    )
    last = folder / "run/checkpoints/last.ckpt"
    with chdir(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        for line in lines:
            if program(line):
                raise RuntimeError(f"a run that all cases start from failed: {line}: {said.getvalue()}")
    shards = sorted((folder / "shards/checkpoints/last.ckpt").iterdir())
    return Material(last.read_bytes(), {path.name: path.read_bytes() for path in shards})


@st.composite
def flipped_bits(draw: st.DrawFn, material: Material) -> Case:
    """Draw a bit to flip; within the file's contents it does harm, elsewhere it may not."""
    place = draw(st.integers(0, len(material.file) - 1))
    content = bytearray(material.file)
    content[place] ^= 1 << draw(st.integers(0, 7))
    harmful = any(start <= place < end for start, end in _held(material.file))
    return draw(_cases("a flipped bit", bytes(content), REFUSE if harmful else EITHER))


@st.composite
def damaged_files(draw: st.DrawFn, material: Material) -> Case:
    """Draw damage to a file."""
    file, noise = material.file, draw(st.binary(min_size=64, max_size=256))
    place = draw(st.integers(1, len(file) - 1))
    ways = {
        "truncated": file[:place],
        "bytes at the end": file + noise,
        "bytes at the beginning": noise + file,
        "bytes taken out": file[:place] + file[place + 64 :],
        "empty": b"",
        "noise": noise,
        "the beginning of a ZIP archive": b"PK\x03\x04" + noise,
        "an empty ZIP archive": archive({}),
        "another ZIP archive": archive({"a.txt": b"hello"}),
        "a pickle of nothing": pickle.dumps(None),
        "a pickle that runs code": EVIL_PICKLE,
        "an archive with a pickle that runs code": _repacked(file, "data.pkl", EVIL_PICKLE),
        "an archive without its records": _repacked(file, "data.pkl", None),
    }
    what = draw(st.sampled_from(sorted(ways)))
    return draw(_cases(what, ways[what], REFUSE))


@st.composite
def wrong_weights(draw: st.DrawFn, material: Material) -> Case:
    """Draw weights that are NaN, or of another model."""
    content = _read(material.file)
    weights = content["state_dict"]
    name = draw(st.sampled_from(sorted(weights)))
    weight = weights.pop(name)
    ways: dict[str, dict[str, Any]] = {
        "a weight is NaN": {name: torch.full_like(weight, float("nan"))},
        "a weight of another shape": {name: weight.new_zeros(*weight.shape, 2)},
        "a weight without entries": {name: weight.new_zeros(0)},
        "a weight is no tensor": {name: draw(st.sampled_from((3, "abc", None, [1.0], {})))},
        "a weight is missing": {},
        "a weight has another name": {f"{name}_": weight},
        "a weight of another kind": {name: weight.to(draw(st.sampled_from(KINDS)))},
        "a sparse weight": {name: weight.to_sparse()},
    }
    what = draw(st.sampled_from(sorted(ways)))
    weights.update(ways[what])
    readable = what in ("a weight of another kind", "a sparse weight")
    return draw(_cases(what, _written(content), EITHER if readable else REFUSE))


@st.composite
def wrong_parts(draw: st.DrawFn, material: Material) -> Case:
    """Draw a part outside the weights, at any depth, that is missing or invalid."""
    content = _read(material.file)
    below: Any = content
    key: Any = draw(st.sampled_from(sorted({*content} - {"state_dict"})))
    path = [str(key)]
    while isinstance(below[key], dict | list) and below[key] and draw(st.integers(0, 5)):
        below = below[key]
        key = draw(st.sampled_from(sorted(below, key=str) if isinstance(below, dict) else range(len(below))))
        path.append(str(key))
    if isinstance(below, dict) and draw(st.booleans()):
        del below[key]
    else:
        below[key] = draw(st.sampled_from(GARBAGE))
    return draw(_cases(f"garbage at {'.'.join(path)[:60]}", _written(content), EITHER))


@st.composite
def whole_files(draw: st.DrawFn, material: Material) -> Case:
    """Draw the unchanged file, or one saved again."""
    how = draw(st.sampled_from(("unchanged", "saved again", "in torch's old format")))
    old = how == "in torch's old format"
    content = material.file if how == "unchanged" else _written(_read(material.file), old=old)
    return draw(_cases(how, content, ACCEPT if how == "unchanged" else EITHER))


@st.composite
def running_code(draw: st.DrawFn, material: Material) -> Case:
    """Draw a pickle that runs code, anywhere in a checkpoint."""
    content = _read(material.file)
    name = draw(st.sampled_from(sorted(content)))
    evil = draw(st.sampled_from((RunsWhenRead(), WritesWhenRead())))
    content[name] = {**content[name], "evil": evil} if isinstance(content[name], dict) else evil
    return draw(_cases(f"code in {name}", _written(content, old=draw(st.booleans())), REFUSE))


@st.composite
def shards(draw: st.DrawFn, material: Material) -> Case:
    """Draw a directory, complete or with a file that is missing, damaged, additional, or runs code."""
    files = dict(material.shards)
    name = draw(st.sampled_from(sorted(files)))
    place = draw(st.integers(0, len(files[name]) - 1))
    flipped = bytearray(files[name])
    flipped[place] ^= 1 << draw(st.integers(0, 7))
    damage = {
        "code": pickle.dumps(RunsWhenRead()) if name == ".metadata" else EVIL_PICKLE,
        "flipped": bytes(flipped),
        "truncated": files[name][:place],
        "empty": b"",
        "at the end": files[name] + b"more",
    }
    ways: dict[str, tuple[dict[str, bytes], Expectation]] = {
        "unchanged": (files, ACCEPT),
        "with another file": ({**files, "notes.txt": b"mine"}, EITHER),
        "with a Python file": ({**files, "stranger.py": FILES["stranger.py"]}, EITHER),
        "only .metadata": ({".metadata": files.get(".metadata", b"")}, REFUSE),
        "only a .metadata that runs code": ({".metadata": pickle.dumps(RunsWhenRead())}, REFUSE),
        "nothing of a checkpoint": ({"notes.txt": b"mine"}, REFUSE),
        "a damaged file": ({"last.ckpt": material.file[:5000]}, REFUSE),
        f"{name} is missing": ({key: files[key] for key in files if key != name}, REFUSE),
        **{f"{name}: {what}": ({**files, name: content}, REFUSE) for what, content in damage.items()},
    }
    what = draw(st.sampled_from(sorted(ways)))
    held, expectation = ways[what]
    # Without its checksums a directory is read as one of plain torch, with a warning.
    if what == "whole is missing":
        expectation = EITHER
    below = {f"{GIVEN}/{file}": content for file, content in held.items()}
    use = draw(st.sampled_from((LOOK, LOOK, TEST, RESUME)))
    return Case(f"shards: {what}", use, expectation, ("ckpt_path",), {**FILES, **below})


def cases(material: Material) -> SearchStrategy[Case]:
    """Return the strategy of all checkpoints."""
    kinds = (flipped_bits, damaged_files, wrong_weights, wrong_parts, whole_files, running_code, shards)
    return st.one_of(*(kind(material) for kind in kinds))


@st.composite
def _cases(draw: st.DrawFn, what: str, content: bytes, expectation: Expectation) -> Case:
    names = ("ckpt_path", "initial_weights")
    return Case(what, draw(USES), expectation, names, {**FILES, GIVEN: content})


def _held(file: bytes) -> list[tuple[int, int]]:
    """Return the positions of the members' contents in an archive."""
    places = []
    with zipfile.ZipFile(io.BytesIO(file)) as members:
        for member in members.infolist():
            header = file[member.header_offset : member.header_offset + 30]
            lengths = int.from_bytes(header[26:28], "little") + int.from_bytes(header[28:30], "little")
            start = member.header_offset + 30 + lengths
            places.append((start, start + member.compress_size))
    return places


def _repacked(file: bytes, ending: str, content: bytes | None) -> bytes:
    """Return the archive with members of an extension replaced or removed."""
    with zipfile.ZipFile(io.BytesIO(file)) as old:
        members = {name: content if name.endswith(ending) else old.read(name) for name in old.namelist()}
    return archive({name: data for name, data in members.items() if data is not None})


def _read(file: bytes) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    return copy.deepcopy(content)


def _written(content: dict[str, Any], *, old: bool = False) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, _use_new_zipfile_serialization=not old)
    return buffer.getvalue()
