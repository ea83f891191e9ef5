"""The attribution program writes its pictures, and says in one line what is wrong with its input."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from lightning.pytorch import LightningDataModule, Trainer
from PIL import Image

from gradpolicy import Guided, Scale, Stop, StraightThrough, When
from gradpolicy.commands import attribute, cli
from gradpolicy.commands.attribute import model_policies
from gradpolicy.insight.pictures import Sample, picture_grid
from gradpolicy.tasks import Classifier, DigitsDataModule, QuantizedConvNet

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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Sample]:
    """The samples that are drawn."""
    samples: list[Sample] = []

    def keep(given: list[Sample], title: str) -> object:
        samples.extend(given)
        return picture_grid(given[:1], title)

    monkeypatch.setattr(attribute, "picture_grid", keep)
    return samples


def main(*arguments: str) -> int:
    """Runs `gradpolicy attribute`."""
    return cli.main(["attribute", *arguments])


def test_each_method_draws_the_test_images(run: Path, tmp_path: Path, drawn: list[Sample]) -> None:
    methods = ("guided", "deconv", "gradient", "smoothgrad", "integrated", "guided_gradcam")
    checkpoint = f"{run}/checkpoints/last.ckpt"
    assert main(f"--ckpt_path={checkpoint}", "--method=all", "--count=10", f"--output={tmp_path}") == 0
    assert {path.name for path in tmp_path.iterdir()} == {f"{name}.png" for name in methods}
    data = DigitsDataModule()
    data.setup()
    images, labels = (part[:10] for part in data.test_set.tensors)
    for first in range(0, 60, 10):
        of_method = drawn[first : first + 10]
        assert torch.equal(torch.stack([sample.image for sample in of_method]).cpu(), images)
        assert [sample.truth for sample in of_method] == [str(int(label)) for label in labels]
        # Without the run's straight-through policy it would be zero.
        assert any(sample.attribution.any() for sample in of_method)


def test_pictures_of_a_directory_are_brought_to_the_size_of_the_model(
    run: Path, photographs: Path, drawn: list[Sample]
) -> None:
    arguments = [f"--ckpt_path={run}", f"--images={photographs}", "--method=gradient,guided", "--target=7"]
    assert main(*arguments) == 0
    assert {path.name for path in (run / "attributions").iterdir()} == {"gradient.png", "guided.png"}
    found = [(sample.title, sample.predicted, sample.truth, sample.image.shape) for sample in drawn]
    assert found == [(name, "7", None, (1, 8, 8)) for name in ("tall.jpg", "wide.png")] * 2


class Tokens(LightningDataModule):
    """Sequences of numbers, as for a language model."""

    batch: Any = (torch.zeros(4, 16, dtype=torch.long), torch.zeros(4, 16, dtype=torch.long))

    def test_dataloader(self) -> Any:
        return [self.batch] if self.batch is not None else None


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        (Tokens.batch, r"holds no images: .* begins with a tensor of int64 with the shape \(4, 16\)"),
        (torch.zeros(4, 2, 8, 8), r"holds no images: .* 1 or 3 channels"),
        (None, "has no test images"),
    ],
)
@pytest.mark.parametrize("images", ["test", "photographs"])
def test_data_that_are_no_images_are_refused_in_one_line(
    run: Path,
    photographs: Path,
    images: str,
    batch: Any,
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(Tokens, "batch", batch)
    monkeypatch.setattr(DigitsDataModule, "test_dataloader", lambda self: Tokens().test_dataloader())
    monkeypatch.chdir(photographs.parent)
    assert main(f"--ckpt_path={run}", f"--images={images}") == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert re.search(message, error)


def test_policies_that_belong_to_the_model_hold_for_every_method() -> None:
    always, in_test = StraightThrough(ops=["round"]), Scale(0.5, modules="a", when=When(phases=("test",)))
    others = [Stop(modules="b"), Guided(when=When(phases=("test",)))]
    assert model_policies([always, in_test, *others]) == (always, in_test)


def test_a_checkpoint_that_lies_alone_has_no_config(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "alone" / "checkpoints" / "last.ckpt"
    path.parent.mkdir(parents=True)
    path.write_bytes((run / "checkpoints" / "last.ckpt").read_bytes())
    assert main(f"--ckpt_path={path}") == 2
    assert "config.yaml is absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("--method=guidd", "method: unknown attribution method 'guidd'"),
        ("--count=0", "--count: 0 given"),
        ("--ckpt_path=no.ckpt", "ckpt_path: "),
        ("--images=nowhere", "--images: nowhere does not exist"),
        ("--images=empty", "holds no picture"),
        ("--images=broken.png", "cannot be read as a picture"),
        ("--target=10", "classes 0 to 9, 10 given"),
    ],
)
def test_wrong_input_gives_one_line_and_exit_code_2(
    argument: str,
    message: str,
    run: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("empty").mkdir()
    Path("broken.png").write_text("no picture")
    assert main(f"--ckpt_path={run}", "--output=out", argument) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: ")
    assert message in error
    assert len(error.splitlines()) == 1
    assert not Path("out").exists()
