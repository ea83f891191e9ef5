"""`gradpolicy delta`: the same from a terminal."""

import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gradpolicy.app.cli import main


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a base as safetensors, two trained models, one of them a checkpoint of Lightning."""
    monkeypatch.chdir(tmp_path)
    base = {"w": torch.zeros(40, 10), "b": torch.zeros(4)}
    save_file(base, "base.safetensors")
    for name, entry in (("one", 3), ("two", 9)):
        after = {key: tensor.clone() for key, tensor in base.items()}
        after["w"].view(-1)[entry] = 1.0
        after["tied"] = after["w"]
        torch.save({"epoch": 3, "state_dict": {key: after[key] for key in base}}, f"{name}.ckpt")
    return tmp_path


def ended(*words: str) -> int | str | None:
    try:
        return main(list(words))
    except SystemExit as end:
        return end.code


def run(*words: str) -> None:
    assert main(["delta", *words]) == 0


def test_an_action_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert ended("delta") == 2
    assert "required: ACTION" in capsys.readouterr().err


def test_save_apply_revert_merge_and_info(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run("save", "one.ckpt", "base.safetensors", "--out", "one.delta")
    run("save", "two.ckpt", "base.safetensors", "--out", "two.delta")
    run("apply", "base.safetensors", "one.delta", "--out", "applied.safetensors")
    assert load_file("applied.safetensors")["w"].view(-1).nonzero().flatten().tolist() == [3]
    run("revert", "one.ckpt", "one.delta", "--out", "reverted.safetensors")
    assert not load_file("reverted.safetensors")["w"].any()
    run("merge", "one.delta", "two.delta", "--weights", "0.5", "-2", "--out", "both.delta")
    run("apply", "base.safetensors", "both.delta", "--out", "both.safetensors")
    assert load_file("both.safetensors")["w"].view(-1)[[3, 9]].tolist() == [0.5, -2.0]
    run("merge", "one.delta", "two.delta", "--out", "both.delta")
    capsys.readouterr()
    run("info", "both.delta")
    shown = capsys.readouterr().out
    assert "2 of 404 entries" in shown
    assert "w " in shown


def test_to_peft_and_from_peft(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    base = {"a.weight": torch.zeros(40, 10), "head.weight": torch.zeros(4, 10)}
    trained = {
        "a.weight": torch.zeros(40, 10).index_fill(0, torch.tensor([3]), 1.0),
        "head.weight": torch.ones(4, 10),
    }
    save_file(base, "layers.safetensors")
    save_file({**trained, "head.weight": base["head.weight"]}, "trained.safetensors")
    run("save", "trained.safetensors", "layers.safetensors", "--out", "rows.delta")
    run("to-peft", "rows.delta", "--out", "adapter")
    assert "wrote adapter" in capsys.readouterr().out
    for words in ([], ["--base", "layers.safetensors"]):
        run("from-peft", "adapter", *words, "--out", "back.delta")
        assert Path("back.delta").read_bytes() == Path("rows.delta").read_bytes()
    save_file(trained, "head.safetensors")
    run("save", "head.safetensors", "layers.safetensors", "--replaces", "head.*", "--out", "head.delta")
    run("apply", "layers.safetensors", "head.delta", "--out", "applied.safetensors")
    assert load_file("applied.safetensors")["head.weight"].all()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["info", "base.safetensors"], "is no file of gradpolicy.delta"),
        (["info", "missing"], "delta: missing cannot be read"),
        (["save", "missing.ckpt", "base.safetensors", "--out", "x.delta"], "missing.ckpt"),
        (
            ["apply", "broken.safetensors", "one.delta", "--out", "x.safetensors"],
            "broken.safetensors is damaged",
        ),
        (["apply", "one.ckpt", "one.delta", "--out", "x.safetensors"], "is it applied already"),
        (["apply", "base.safetensors", "one.delta", "--out", "x.pt"], "x.pt must end with .safetensors"),
        (["merge", "one.delta", "one.delta", "--weights", "1", "--out", "x"], "2 files need as many weights"),
    ],
)
def test_wrong_input_is_refused(files, words, message, refusal) -> None:
    run("save", "one.ckpt", "base.safetensors", "--out", "one.delta")
    Path("broken.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    assert message in refusal("delta", *words)
    assert not list(files.glob("x*"))


@pytest.mark.parametrize("kept", ["two.ckpt", "notes.txt", "empty", "folder", "pipe", "link"])
@pytest.mark.parametrize(
    "words",
    [
        ["save", "one.ckpt", "base.safetensors"],
        ["merge", "one.delta", "one.delta"],
        ["apply", "base.safetensors", "one.delta"],
        ["revert", "one.ckpt", "one.delta"],
    ],
)
def test_no_file_that_is_no_delta_is_ever_overwritten(files, words, kept, refusal) -> None:
    run("save", "one.ckpt", "base.safetensors", "--out", "one.delta")
    Path("notes.txt").write_text("mine")
    Path("empty").touch()
    Path("folder").mkdir()
    os.mkfifo("pipe")
    Path("link").symlink_to("nowhere")
    before = {path: path.read_bytes() for path in files.iterdir() if path.is_file()}
    assert refusal("delta", *words, "--out", kept).startswith(f"delta: {kept} is there already")
    assert {path: path.read_bytes() for path in files.iterdir() if path.is_file()} == before


def test_a_delta_is_replaced_by_a_delta_and_by_no_weights(files: Path, refusal) -> None:
    run("save", "one.ckpt", "base.safetensors", "--out", "task.delta")
    run("save", "two.ckpt", "base.safetensors", "--out", "task.delta")
    run("apply", "base.safetensors", "task.delta", "--out", "new.safetensors")
    assert load_file("new.safetensors")["w"].view(-1).nonzero().flatten().tolist() == [9]
    for out in ("task.delta", "new.safetensors"):
        assert refusal("delta", "apply", "base.safetensors", "task.delta", "--out", out)
