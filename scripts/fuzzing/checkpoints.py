"""Hypothesis strategies of checkpoints."""

import copy
import io
import pickle
import zipfile
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

from fuzzing.case import ACCEPT, EITHER, REFUSE, SHORT, Case, Expectation, command
from fuzzing.dangers import EVIL_PICKLE, FILES, RunsWhenRead, WritesWhenRead, archive
from fuzzing.running import Program

GIVEN = "given.ckpt"
# A refusal has one of these words.
NAMES = ("ckpt_path", "initial_weights")
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


def prepare(program: Program, folder: Path) -> bytes:
    """Train for one batch in this process and plan the default job, so that forks need no imports.

    Returns:
        The checkpoint of the run.
    """
    lines = (
        command(MODEL, "extras.plan=true", "hydra.run.dir=run", base=SHORT),
        command(MODEL, "callbacks=default"),
        ("plan_only=true",),
    )
    with chdir(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        for line in lines:
            if program(line):
                raise RuntimeError(f"a run that all cases start from failed: {line}: {said.getvalue()}")
    return (folder / "run/checkpoints/last.ckpt").read_bytes()


@st.composite
def flipped_bits(draw: st.DrawFn, file: bytes) -> Case:
    """Draw a bit to flip; within the file's contents it does harm, elsewhere it may not."""
    place = draw(st.integers(0, len(file) - 1))
    content = bytearray(file)
    content[place] ^= 1 << draw(st.integers(0, 7))
    harmful = any(start <= place < end for start, end in _held(file))
    return draw(_cases("a flipped bit", bytes(content), REFUSE if harmful else EITHER))


@st.composite
def damaged_files(draw: st.DrawFn, file: bytes) -> Case:
    """Draw damage to a file."""
    noise = draw(st.binary(min_size=64, max_size=256))
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
def wrong_weights(draw: st.DrawFn, file: bytes) -> Case:
    """Draw weights that are NaN, or of another model."""
    content = _read(file)
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
def wrong_parts(draw: st.DrawFn, file: bytes) -> Case:
    """Draw a part outside the weights, at any depth, that is missing or invalid."""
    content = _read(file)
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
def whole_files(draw: st.DrawFn, file: bytes) -> Case:
    """Draw the unchanged file, or one saved again."""
    how = draw(st.sampled_from(("unchanged", "saved again", "in torch's old format")))
    old = how == "in torch's old format"
    content = file if how == "unchanged" else _written(_read(file), old=old)
    return draw(_cases(how, content, ACCEPT if how == "unchanged" else EITHER))


@st.composite
def running_code(draw: st.DrawFn, file: bytes) -> Case:
    """Draw a pickle that runs code, anywhere in a checkpoint."""
    content = _read(file)
    name = draw(st.sampled_from(sorted(content)))
    evil = draw(st.sampled_from((RunsWhenRead(), WritesWhenRead())))
    content[name] = {**content[name], "evil": evil} if isinstance(content[name], dict) else evil
    return draw(_cases(f"code in {name}", _written(content, old=draw(st.booleans())), REFUSE))


@st.composite
def directories(draw: st.DrawFn, file: bytes) -> Case:
    """Draw a directory: one of shards, or one with a checkpoint, which ``ckpt_path`` then means."""
    kinds = ((".metadata", pickle.dumps(RunsWhenRead()), REFUSE), ("model.ckpt", file, EITHER))
    name, content, expectation = draw(st.sampled_from(kinds))
    return Case("a directory", draw(USES), expectation, NAMES, {**FILES, f"{GIVEN}/{name}": content})


def cases(file: bytes) -> SearchStrategy[Case]:
    """Return the strategy of all checkpoints."""
    kinds = (flipped_bits, damaged_files, wrong_weights, wrong_parts, whole_files, running_code, directories)
    return st.one_of(*(kind(file) for kind in kinds))


@st.composite
def _cases(draw: st.DrawFn, what: str, content: bytes, expectation: Expectation) -> Case:
    return Case(what, draw(USES), expectation, NAMES, {**FILES, GIVEN: content})


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
