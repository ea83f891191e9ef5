"""Mutations of checkpoints, as files and as directories of shards."""

import copy
import io
import json
import pickle
import random
import time
import zipfile
from collections.abc import Callable, Mapping
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fuzzing.case import SHORT, Case, Expectation, command
from fuzzing.dangers import FILES, RunsWhenRead, WritesWhenRead, evil_pickle
from fuzzing.running import Program, Running

ACCEPT, REFUSE, EITHER = Expectation.ACCEPT, Expectation.REFUSE, Expectation.EITHER
GIVEN = "given.ckpt"
# A small model makes a small file.
MODEL = "model.model.width=2"

LOOK = command(f"ckpt_path={GIVEN}", MODEL)
TEST = command(f"ckpt_path={GIVEN}", "train=false", MODEL, base=SHORT)
RESUME = command(f"ckpt_path={GIVEN}", "trainer.max_epochs=2", "test=false", MODEL, base=SHORT)
START = command(
    "callbacks=initial_weights", f"callbacks.initial_weights.path={GIVEN}", "test=false", MODEL, base=SHORT
)
# Most cases only look at the file; the others cost a run.
USES = (*(LOOK,) * 5, TEST, RESUME, START)


@dataclass(frozen=True)
class Material:
    """Checkpoints of one short run.

    Attributes:
        file: A checkpoint in one file.
        shards: The files of a checkpoint that is a directory.
        metrics: What a test of the file's weights measures.
    """

    file: bytes
    shards: Mapping[str, bytes]
    metrics: Mapping[str, float]


def warm_up(program: Program, folder: Path) -> bytes:
    """Trains for one batch in this very process and plans the default job, so that no fork imports anything.

    Returns:
        The checkpoint.
    """
    with chdir(folder), redirect_stdout(io.StringIO()), redirect_stderr(io.StringIO()) as said:
        codes = [
            program(command(MODEL, "extras.plan=true", "hydra.run.dir=run", base=SHORT)),
            program(command(MODEL, "callbacks=default")),
            program(("plan_only=true",)),
        ]
    if any(codes):
        raise RuntimeError(f"the run that all cases start from failed: {said.getvalue()}")
    return (folder / "run/checkpoints/last.ckpt").read_bytes()


def prepare(program: Program, file: bytes, folder: Path) -> Material:
    """Makes the other checkpoint, and measures what the first is worth.

    Args:
        program: What is run.
        file: The checkpoint of :func:`warm_up`.
        folder: An empty directory.
    """
    sharded = command(
        "trainer=fsdp2", "trainer.accelerator=cpu", MODEL, "hydra.run.dir=outputs/run", base=SHORT
    )
    trained = _run(program, Case("train with shards", sharded), folder / "train")
    last = trained / "outputs/run/checkpoints/last.ckpt"
    tested = _run(
        program, Case("test", (*TEST, "hydra.run.dir=outputs/run"), files={GIVEN: file}), folder / "test"
    )
    metrics = json.loads((tested / "outputs/run/result.json").read_text())["metrics"]
    return Material(file, {path.name: path.read_bytes() for path in sorted(last.iterdir())}, metrics)


def _run(program: Program, case: Case, place: Path) -> Path:
    running = Running(case, program, place)
    while (outcome := running.ended(limit=120)) is None:
        time.sleep(0.01)
    if outcome.code != 0:
        raise RuntimeError(f"{case.mutation}: exit code {outcome.code}: {outcome.out}{outcome.err}")
    return running.folder


# ---- mutations of bytes


def unchanged(draw: random.Random, material: Material) -> Case:
    use = draw.choice(USES)
    return _case("unchanged", material.file, ACCEPT, use, material.metrics if use is TEST else None)


def flipped_bit(draw: random.Random, material: Material) -> Case:
    """One bit of the file: where it lies in what the file holds it does harm, between that perhaps not."""
    place = draw.randrange(len(material.file))
    content = bytearray(material.file)
    content[place] ^= 1 << draw.randrange(8)
    harmful = any(start <= place < end for start, end in _held(material.file))
    use = draw.choice(USES)
    metrics = material.metrics if use is TEST else None
    return _case("a flipped bit", bytes(content), REFUSE if harmful else EITHER, use, metrics)


def damaged(draw: random.Random, material: Material) -> Case:
    """Damage that no whole file has."""
    file = material.file
    place = draw.randrange(1, len(file))
    length = draw.randint(64, 4096)
    ways = {
        "truncated": file[:place],
        "bytes at the end": file + draw.randbytes(draw.choice((1, 7, 4096))),
        "zeros at the end": file + bytes(draw.choice((1, 512))),
        "bytes at the beginning": draw.randbytes(16) + file,
        "bytes taken out": file[:place] + file[place + length :],
        "a block of noise": file[:place] + draw.randbytes(length) + file[place + length :],
        "twice": file + file,
        "empty": b"",
        "a text": b"hello\n" * draw.randint(1, 200),
        "noise": draw.randbytes(length),
        "the beginning of a ZIP archive": b"PK\x03\x04" + draw.randbytes(length),
        "an empty ZIP archive": _archive({}),
        "another ZIP archive": _archive({"a.txt": b"hello"}),
        "a pickle of nothing": pickle.dumps(None),
        "a pickle that runs code": evil_pickle(),
        "an archive with a pickle that runs code": _repacked(file, "data.pkl", evil_pickle()),
        "an archive without its records": _repacked(file, "data.pkl", None),
    }
    mutation = draw.choice(sorted(ways))
    return _case(mutation, ways[mutation], REFUSE, draw.choice(USES))


# ---- mutations of what a checkpoint holds


def wrong_weights(draw: random.Random, material: Material) -> Case:
    """Weights that are no numbers, or not this model's."""
    content = _read(material.file)
    weights = content["state_dict"]
    name = draw.choice(sorted(weights))
    weight: Tensor = weights[name]
    spoilt = weight.clone()
    spoilt.view(-1)[draw.randrange(spoilt.numel())] = float("nan")
    ways: dict[str, Any] = {
        "a weight is NaN": spoilt,
        "all weights are NaN": torch.full_like(weight, float("nan")),
        "a weight of another shape": weight.new_zeros(*weight.shape, 2),
        "a weight without entries": weight.new_zeros(0),
        "a weight is no tensor": draw.choice((3, "abc", None, [1.0], {})),
        "a weight is missing": None,
        "a weight has another name": None,
    }
    mutation = draw.choice(sorted(ways))
    weights[name] = ways[mutation]
    if mutation in {"a weight is missing", "a weight has another name"}:
        del weights[name]
    if mutation == "a weight has another name":
        weights[f"{name}_"] = weight
    return _case(mutation, _written(content), REFUSE, draw.choice(USES))


def odd_weights(draw: random.Random, material: Material) -> Case:
    """Weights of another kind, which could be read."""
    content = _read(material.file)
    name = draw.choice(sorted(content["state_dict"]))
    weight = content["state_dict"][name]
    kind = draw.choice(
        (torch.float64, torch.float16, torch.bfloat16, torch.int8, torch.bool, torch.complex64)
    )
    changed = draw.choice(
        (
            weight.to(kind),
            weight.to_sparse(),
            weight * float("inf"),
            weight.transpose(0, -1).contiguous().transpose(0, -1),
        )
    )
    content["state_dict"][name] = changed
    return _case("a weight of another kind", _written(content), EITHER, draw.choice(USES))


def wrong_part(draw: random.Random, material: Material) -> Case:
    """A part at the top is missing, has another name or is of another kind."""
    content = _read(material.file)
    name = draw.choice(sorted(content))
    way = draw.choice(("missing", "renamed", "retyped", "emptied"))
    part = content.pop(name)
    if way == "renamed":
        content[f"{name}s"] = part
    if way == "retyped":
        content[name] = draw.choice(
            (None, 3, -1, "abc", "999.0.0", [], [1], {}, {"a": 1}, 1.5, torch.zeros(2))
        )
    if way == "emptied":
        content[name] = type(part)()
    expectation = REFUSE if name == "state_dict" else EITHER
    return _case(f"{name} is {way}", _written(content), expectation, draw.choice(USES))


def wrong_depth(draw: random.Random, material: Material) -> Case:
    """Anything anywhere below: deleted, or replaced by garbage."""
    content = _read(material.file)
    below: Any = content
    key: Any = draw.choice(sorted({*content} - {"state_dict"}))
    path = [str(key)]
    while draw.random() < 0.85 and isinstance(below[key], dict | list) and below[key]:
        below = below[key]
        key = draw.choice(sorted(below, key=str)) if isinstance(below, dict) else draw.randrange(len(below))
        path.append(str(key))
    if isinstance(below, dict) and draw.random() < 0.4:
        del below[key]
        mutation = "an entry is missing"
    else:
        below[key] = draw.choice(
            (None, -1, 10**18, "abc", [], {}, [1], {"a": 1}, float("nan"), torch.zeros(3))
        )
        mutation = "an entry is garbage"
    return _case(f"{mutation}: {'.'.join(path)[:60]}", _written(content), EITHER, draw.choice(USES))


def resaved(draw: random.Random, material: Material) -> Case:
    """The same content, written by hand: whoever takes it must get the same weights."""
    old_format = draw.random() < 0.5
    content = _read(material.file)
    use = draw.choice(USES)
    metrics = material.metrics if use is TEST else None
    mutation = "saved again in torch's old format" if old_format else "saved again"
    return _case(
        mutation, _written(content, _use_new_zipfile_serialization=not old_format), EITHER, use, metrics
    )


def running_code(draw: random.Random, material: Material) -> Case:
    """A pickle that runs code, at any place of a checkpoint."""
    content = _read(material.file)
    name = draw.choice(sorted(content))
    part = content[name]
    evil = draw.choice((RunsWhenRead(), WritesWhenRead()))
    if isinstance(part, dict):
        part["evil"] = evil
    else:
        content[name] = evil
    new_format = draw.random() < 0.7
    return _case(
        f"code in {name}",
        _written(content, _use_new_zipfile_serialization=new_format),
        REFUSE,
        draw.choice(USES),
    )


# ---- directories


def right_shards(draw: random.Random, material: Material) -> Case:
    return _shards("unchanged shards", material.shards, ACCEPT, draw.choice((LOOK, TEST, RESUME)))


def wrong_shards(draw: random.Random, material: Material) -> Case:
    """A directory in which a file is missing, damaged, or runs code."""
    files = dict(material.shards)
    # What is no file's own business, such as an empty marker, has nothing to damage.
    name = draw.choice([name for name, content in sorted(files.items()) if content])
    place = draw.randrange(len(files[name]))
    way = draw.choice(("code", "code", "flipped", "truncated", "missing", "empty", "noise", "at the end"))
    flipped = bytearray(files[name])
    flipped[place] ^= 1 << draw.randrange(8)
    files[name] = {
        "code": pickle.dumps(RunsWhenRead()) if name == ".metadata" else evil_pickle(),
        "flipped": bytes(flipped),
        "truncated": files[name][:place],
        "empty": b"",
        "noise": draw.randbytes(200),
        "at the end": files[name] + b"more",
        "missing": b"",
    }[way]
    if way == "missing":
        del files[name]
    # Without its checksums a directory is read as one that torch alone wrote, and a warning says so.
    unchecked = name == "whole" and way in ("missing", "empty")
    expectation = EITHER if unchecked else REFUSE
    return _shards(f"{name}: {way}", files, expectation, draw.choice((LOOK, LOOK, LOOK, TEST, RESUME)))


def odd_shards(draw: random.Random, material: Material) -> Case:
    """A directory that holds more or less than it should."""
    ways: dict[str, Mapping[str, bytes]] = {
        "another file": {**material.shards, "notes.txt": b"mine"},
        "a Python file": {**material.shards, "stranger.py": FILES["stranger.py"]},
        "only .metadata": {".metadata": material.shards.get(".metadata", b"")},
        "only a .metadata that runs code": {".metadata": pickle.dumps(RunsWhenRead())},
        "nothing of a checkpoint": {"notes.txt": b"mine"},
        "a checkpoint in the directory": {"last.ckpt": material.file},
        "a damaged checkpoint in the directory": {"last.ckpt": material.file[:5000]},
        "one that runs code in the directory": {"last.ckpt": evil_pickle()},
    }
    mutation = draw.choice(sorted(ways))
    wrong = mutation.startswith(("only", "nothing", "a damaged", "one that"))
    return _shards(f"directory: {mutation}", ways[mutation], REFUSE if wrong else EITHER, LOOK)


MUTATIONS: tuple[Callable[[random.Random, Material], Case], ...] = (
    unchanged,
    *(flipped_bit,) * 4,
    *(damaged,) * 3,
    *(wrong_weights,) * 3,
    odd_weights,
    *(wrong_part,) * 3,
    *(wrong_depth,) * 4,
    resaved,
    *(running_code,) * 2,
    right_shards,
    *(wrong_shards,) * 3,
    odd_shards,
)


def mutate(draw: random.Random, material: Material) -> Case:
    """A checkpoint with something done to it."""
    return draw.choice(MUTATIONS)(draw, material)


def _case(
    mutation: str,
    content: bytes,
    expectation: Expectation,
    use: tuple[str, ...],
    metrics: Mapping[str, float] | None = None,
) -> Case:
    return Case(
        mutation, use, expectation, ("ckpt_path", "initial_weights"), {**FILES, GIVEN: content}, {}, metrics
    )


def _shards(
    mutation: str, files: Mapping[str, bytes], expectation: Expectation, use: tuple[str, ...]
) -> Case:
    below = {f"{GIVEN}/{name}": content for name, content in files.items()}
    return Case(mutation, use, expectation, ("ckpt_path",), {**FILES, **below})


def _held(file: bytes) -> list[tuple[int, int]]:
    """Where in an archive the contents of its members lie."""
    places = []
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        for member in archive.infolist():
            header = file[member.header_offset : member.header_offset + 30]
            start = member.header_offset + 30 + int.from_bytes(header[26:28], "little")
            start += int.from_bytes(header[28:30], "little")
            places.append((start, start + member.compress_size))
    return places


def _repacked(file: bytes, ending: str, content: bytes | None) -> bytes:
    """The archive with another content of the members with an ending, or without them."""
    with zipfile.ZipFile(io.BytesIO(file)) as archive:
        members = {
            name: content if name.endswith(ending) else archive.read(name) for name in archive.namelist()
        }
    return _archive({name: data for name, data in members.items() if data is not None})


def _archive(members: Mapping[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _read(file: bytes) -> dict[str, Any]:
    content: dict[str, Any] = torch.load(io.BytesIO(file), weights_only=True)
    return copy.deepcopy(content)


def _written(content: dict[str, Any], **how: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer, **how)
    return buffer.getvalue()
