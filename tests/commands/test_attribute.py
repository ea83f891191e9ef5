"""The attribution program writes its pictures, and says in one line what is wrong with its input."""

import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import Trainer
from PIL import Image

from gradpolicy import Guided, Scale, Stop, StraightThrough, When
from gradpolicy.commands import attribute, cli
from gradpolicy.commands.attribute import make_parser, model_policies, read_options
from gradpolicy.tasks import Classifier, DigitsDataModule, QuantizedConvNet


def main(arguments: list[str]) -> int:
    """Runs `gradpolicy attribute`."""
    return cli.main(["attribute", *arguments])


CONFIG: dict[str, Any] = {
    "data": {"_target_": "gradpolicy.tasks.DigitsDataModule"},
    "model": {
        "_target_": "gradpolicy.tasks.Classifier",
        "model": {"_target_": "gradpolicy.tasks.QuantizedConvNet", "width": 4},
        "optimizer": {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1},
    },
    "policy": {"quantizer": {"_target_": "gradpolicy.StraightThrough", "ops": ["round"]}},
}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run, with a checkpoint and its config."""
    directory = tmp_path_factory.mktemp("run")
    module = Classifier(QuantizedConvNet(width=4), partial(torch.optim.SGD, lr=0.1))
    quiet = dict.fromkeys(
        ("logger", "enable_progress_bar", "enable_model_summary", "enable_checkpointing"), False
    )
    trainer = Trainer(max_steps=1, limit_val_batches=0, accelerator="cpu", **quiet)
    trainer.fit(module, DigitsDataModule())
    trainer.save_checkpoint(directory / "checkpoints" / "last.ckpt")
    (directory / "config.yaml").write_text(yaml.safe_dump(CONFIG))
    return directory


@pytest.fixture
def photographs(tmp_path: Path) -> Path:
    directory = tmp_path / "photographs"
    directory.mkdir()
    for name, size in (("wide.png", (40, 20)), ("tall.jpg", (20, 40))):
        pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(directory / name)
    (directory / "notes.txt").write_text("no picture")
    return directory


@pytest.mark.slow
@pytest.mark.parametrize("method", ["guided", "deconv", "gradient", "smoothgrad", "guided_gradcam"])
def test_each_method_writes_overlays_and_a_grid(method: str, run: Path, tmp_path: Path) -> None:
    arguments = [f"ckpt_path={run}/checkpoints/last.ckpt", f"method={method}", f"output={tmp_path}"]
    assert main([*arguments, "images=test", "count=3"]) == 0
    pictures = ["grid.png", "test_0000.png", "test_0001.png", "test_0002.png"]
    assert sorted(path.name for path in tmp_path.iterdir()) == pictures
    colours = np.asarray(Image.open(tmp_path / "test_0000.png").convert("HSV"))
    assert colours[..., 1].max() > 100  # an attribution of zero would leave it grey


def test_pictures_of_a_directory_are_brought_to_the_size_of_the_model(run: Path, photographs: Path) -> None:
    assert main([f"ckpt_path={run}", f"images={photographs}"]) == 0
    written = {path.name for path in (run / "attributions" / "guided").iterdir()}
    assert written == {"grid.png", "wide.png", "tall.png"}


def test_pictures_that_are_not_normalised_as_the_test_images_give_a_warning(
    run: Path, photographs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = DigitsDataModule.test_dataloader

    def normalised(data: DigitsDataModule) -> Any:
        return [(4 * images - 2, labels) for images, labels in plain(data)]

    monkeypatch.setattr(DigitsDataModule, "test_dataloader", normalised)
    read = ["--ckpt_path", str(run), "--method", "gradient", "--images", str(photographs)]
    with pytest.warns(UserWarning, match="from 0 to 1, and the run's test images lie between -2 and 2"):
        assert main([*read, "--output", str(run / "normalised")]) == 0


def test_several_methods_have_a_directory_each(run: Path, tmp_path: Path) -> None:
    arguments = [f"ckpt_path={run}", "method=gradient,guided_gradcam", "count=1", f"output={tmp_path}"]
    assert main(arguments) == 0
    assert sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.png")) == [
        f"{method}/{name}.png" for method in ("gradient", "guided_gradcam") for name in ("grid", "test_0000")
    ]


def test_pictures_of_one_name_are_told_apart(run: Path, tmp_path: Path) -> None:
    for name in ("a.png", "a.jpg", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    with pytest.warns(UserWarning, match="zero everywhere"):
        main([f"ckpt_path={run}", f"images={tmp_path}", f"output={tmp_path / 'out'}", "method=gradient"])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        *("a.jpg.png", "a.png.png", "b.png", "grid.png")
    ]


TOKENS = torch.zeros(4, 16, dtype=torch.long)


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([TOKENS, TOKENS], r"holds no images: .* begins with a tensor of int64 with the shape \(4, 16\)"),
        ({"image": torch.zeros(4, 1, 8, 8)}, "holds no images: .* begins with dict"),
        (torch.zeros(4, 2, 8, 8), "images: the model takes 2 channels"),
        (None, "has no test images"),
    ],
)
@pytest.mark.parametrize("images", ["test", "photographs"])
def test_data_that_are_no_images_are_refused(
    run, photographs, images, batch, message, monkeypatch, refusal
) -> None:
    loader = None if batch is None else [batch]
    monkeypatch.setattr(DigitsDataModule, "test_dataloader", lambda self: loader)
    monkeypatch.chdir(photographs.parent)
    said = refusal("attribute", f"ckpt_path={run}", f"images={images}")
    assert re.search(message, said)


def test_a_model_that_gives_no_class_scores_is_refused(run, monkeypatch, refusal) -> None:
    monkeypatch.setattr(Classifier, "forward", lambda self, images: images)
    said = refusal("attribute", f"ckpt_path={run}", "method=gradient")
    assert said.startswith("model: gives logits of the shape (8, 1, 8, 8) for 8 images")


def test_one_class_can_be_asked_for(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(
        attribute,
        "save_overlay",
        lambda sample, path: (seen.append(sample), path.parent.mkdir(exist_ok=True)),
    )
    assert main([f"ckpt_path={run}", "target=7", "count=2", f"output={tmp_path / 'seven'}"]) == 0
    assert [(sample.predicted, sample.truth) for sample in seen] == [("7", None)] * 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["ckpt_path=epoch=3.ckpt", "count=5", "debug=true"],
        ["--ckpt_path", "epoch=3.ckpt", "--count=5", "--debug"],
    ],
)
def test_options_are_read_by_their_types_in_both_forms(arguments: list[str]) -> None:
    options = vars(read_options(make_parser(), arguments))
    given = {"ckpt_path": "epoch=3.ckpt", "count": 5, "debug": "true"}
    assert options == {**vars(make_parser().parse_args([])), **given}


def test_policies_that_belong_to_the_model_hold_for_every_method() -> None:
    always, in_test = StraightThrough(ops=["round"]), Scale(0.5, modules="a", when=When(phases=("test",)))
    others = [Stop(modules="b"), Guided(when=When(phases=("test",)))]
    assert model_policies([always, in_test, *others]) == (always, in_test)


CHECKPOINT = "ckpt_path=run/checkpoints/last.ckpt"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["guided"], "guided: there is no such flag"),
        ([CHECKPOINT, "metod=guided"], "metod: there is no such flag; did you mean '--method'"),
        ([CHECKPOINT, "method=guidd"], "method: unknown attribution method 'guidd'"),
        ([CHECKPOINT, "count=many"], "--count: invalid int value: 'many'"),
        ([CHECKPOINT, "count=0"], "count: must be a whole number of at least 1, got 0"),
        (["method=guided"], "ckpt_path: name a checkpoint"),
        (["ckpt_path=no.ckpt"], "ckpt_path: "),
        (["ckpt_path=alone/checkpoints/last.ckpt"], "config.yaml is absent"),
        ([CHECKPOINT, "images=nowhere"], "images: "),
        ([CHECKPOINT, "images=empty"], "holds no picture"),
        ([CHECKPOINT, "images=broken.png"], "cannot be read as a picture"),
        ([CHECKPOINT, "target=10"], "classes 0 to 9, 10 given"),
        ([CHECKPOINT, "device=abacus"], "device: 'abacus' cannot be used"),
        ([CHECKPOINT, "output=photographs"], "is there already; name a new or an empty directory"),
    ],
)
def test_wrong_input_is_refused(arguments, message, run, photographs, tmp_path, monkeypatch, refusal) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run").symlink_to(run)
    shutil.copytree(run / "checkpoints", "alone/checkpoints")
    Path("empty").mkdir()
    Path("broken.png").write_text("no picture")
    assert message in refusal("attribute", "output=out", *arguments)
    assert not Path("out").exists()


def test_help_names_every_setting(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    shown = capsys.readouterr().out
    assert all(f"--{name} " in shown for name in vars(make_parser().parse_args([])))
    assert main([]) == 2
    assert capsys.readouterr().out == shown
