"""Masks and ages as images; the callback that draws them during a run."""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger, MLFlowLogger, TensorBoardLogger, WandbLogger
from PIL import Image

import gradpolicy as gp
from gradpolicy.insight.mask_pictures import (
    ACTIVE,
    FROZEN,
    GAP,
    LARGEST,
    MaskPictures,
    age_image,
    as_matrix,
    film_strip,
    mask_image,
)
from gradpolicy.insight.pictures import log_image


def colours(image: Image.Image) -> np.ndarray:
    return np.asarray(image.convert("RGB"))


# ---- images


def test_a_matrix_is_drawn_entry_by_entry() -> None:
    mask = torch.rand(5, 3) < 0.5
    drawn = colours(mask_image(mask))
    times = drawn.shape[0] // 5
    assert drawn.shape == (5 * times, 3 * times, 3)
    expected = np.where(mask.numpy()[..., None], ACTIVE, FROZEN)
    assert (drawn[times // 2 :: times, times // 2 :: times] == expected).all()


def test_kernels_are_tiles_with_gaps_between_them() -> None:
    weight = torch.arange(2 * 3 * 2 * 2.0).reshape(2, 3, 2, 2)
    matrix = as_matrix(weight)
    assert matrix.shape == (5, 8)
    for row in range(2):
        for column in range(3):
            tile = matrix[3 * row : 3 * row + 2, 3 * column : 3 * column + 2]
            assert (tile == weight[row, column].numpy()).all()
    assert np.isnan(matrix[2]).all()
    assert np.isnan(matrix[:, [2, 5]]).all()
    image = mask_image(torch.ones_like(weight, dtype=torch.bool))
    times = image.height // 5
    assert (colours(image)[2 * times + times // 2] == GAP).all()


@pytest.mark.parametrize("shape", [(), (7,), (4, 3, 5), (2, 3, 2, 2, 2)])
def test_every_shape_has_a_picture(shape: tuple[int, ...]) -> None:
    mask = torch.ones(shape, dtype=torch.bool)
    ages = torch.ones(shape, dtype=torch.int64)
    assert mask_image(mask).size == age_image(ages, mask).size


def test_a_large_mask_is_shrunk_to_shares() -> None:
    mask = torch.zeros(4 * LARGEST, 2 * LARGEST, dtype=torch.bool)
    mask[: 2 * LARGEST] = True
    mask[2 * LARGEST :, ::2] = True
    drawn = colours(mask_image(mask)).astype(int)
    assert drawn.shape == (LARGEST, LARGEST, 3)
    assert (drawn[: LARGEST // 2] == ACTIVE).all()
    halfway = (np.array(ACTIVE) + FROZEN) / 2
    assert np.abs(drawn[LARGEST // 2 + 1 :] - halfway).max() <= 2


def test_older_entries_are_brighter_and_frozen_ones_grey() -> None:
    ages = torch.tensor([[0, 5, 10], [10, 10, 10]])
    mask = torch.tensor([[True, True, True], [True, False, True]])
    image = age_image(ages, mask)
    times = image.height // 2
    drawn = colours(image)[times // 2 :: times, times // 2 :: times].astype(int)
    brightness = drawn.sum(axis=-1)
    assert brightness[0, 0] < brightness[0, 1] < brightness[0, 2]
    assert (drawn[1, 1] == FROZEN).all()
    assert (drawn[0, 2] == drawn[1, 0]).all()
    assert (colours(age_image(ages, mask, oldest=20)) != colours(image)).any()


def test_a_film_strip_holds_every_picture() -> None:
    pictures = [mask_image(torch.full((4, 4), bool(i % 2))) for i in range(5)]
    strip = film_strip(pictures, [f"step {i}" for i in range(5)], columns=3)
    assert strip.width > 3 * pictures[0].width
    assert strip.height > 2 * pictures[0].height
    assert ((colours(strip) == ACTIVE).all(axis=-1)).sum() == 2 * pictures[0].width * pictures[0].height
    with pytest.raises(ValueError, match="0 pictures"):
        film_strip([], [])


# ---- during a run


@pytest.fixture
def policies() -> gp.GradientPolicies:
    return gp.GradientPolicies({"half": gp.Freeze(gp.masks.Random(density=0.5, every=1), params="trunk.*")})


def drawn_steps(folder: Path) -> list[int]:
    return [int(path.stem.removeprefix("mask_")) for path in sorted(folder.glob("mask_*.png"))]


def test_a_run_leaves_the_masks_that_were_in_force(fit, two_layers, policies, tmp_path) -> None:
    trainer = fit(MaskPictures(every=3), policies, max_epochs=2)
    folder = tmp_path / "masks" / "trunk.2.weight"
    # Every third change of eight, beginning with the first.
    assert drawn_steps(folder) == [1, 4, 7]
    assert {path.name for path in folder.glob("history*")} == {"history_mask.png", "history_age.png"}
    policies.freezer.begin_step(6, 1)
    mask = trainer.optimizers[0].get_mask(two_layers.trunk[2].weight)
    assert (colours(Image.open(folder / "mask_000000007.png")) == colours(mask_image(mask))).all()


def test_a_long_run_keeps_few_pictures(fit, policies, tmp_path: Path) -> None:
    fit(MaskPictures(every=1, frames=4, count=1), policies, max_epochs=8)
    steps = drawn_steps(tmp_path / "masks" / "trunk.0.weight")
    assert len(steps) <= 4
    assert steps[0] == 1
    assert steps[-1] > 16
    assert [path.name for path in (tmp_path / "masks").iterdir()] == ["trunk.0.weight"]


def test_a_resumed_run_has_the_pictures_of_one_that_was_left_alone(fit, policies, tmp_path: Path) -> None:
    drawing = MaskPictures(every=2, count=1)
    fit(drawing, policies).save_checkpoint(tmp_path / "one.ckpt")
    late = tmp_path / "masks" / "trunk.0.weight" / "mask_000000007.png"
    late.write_bytes(b"of a step that is taken again")
    drawing = MaskPictures(every=2, count=1)
    fit(drawing, policies, max_epochs=2, ckpt_path=tmp_path / "one.ckpt")
    steps = drawn_steps(tmp_path / "masks" / "trunk.0.weight")
    assert steps == [1, 3, 5, 7]
    Image.open(late).load()


def test_weights_that_train_and_freeze_as_a_whole_have_no_pictures(fit, tmp_path: Path) -> None:
    policies = {
        "layers": gp.Freeze(gp.masks.Layerwise(active=1, every=1), params="trunk.0.*"),
        "half": gp.Freeze(gp.masks.Random(0.5, every=9), params="trunk.2.*", when=gp.When(start=2)),
    }
    fit(MaskPictures(every=1, count=1), gp.GradientPolicies(policies))
    assert [path.name for path in (tmp_path / "masks").iterdir()] == ["trunk.2.weight"]
    assert drawn_steps(tmp_path / "masks" / "trunk.2.weight") == [3]  # until then every entry trained


def test_wrong_input_names_the_key(fit, policies) -> None:
    with pytest.raises(gp.PolicyError, match=r"MaskPictures.every"):
        MaskPictures(every=0)
    with pytest.raises(gp.PolicyError, match=r"MaskPictures.params.*trunk.0.weight"):
        fit(MaskPictures(params="trunk.0.wieght"), policies)


def test_loggers_that_take_images_get_them(tmp_path: Path) -> None:
    image = mask_image(torch.ones(2, 2, dtype=torch.bool))
    path = tmp_path / "fc.weight" / "mask_000000003.png"
    wandb, board, mlflow = (Mock(spec=kind) for kind in (WandbLogger, TensorBoardLogger, MLFlowLogger))
    board.experiment, mlflow.experiment, mlflow.run_id = Mock(), Mock(), "id"
    path.parent.mkdir()
    image.save(path)
    for logger in (wandb, board, mlflow, Mock(spec=CSVLogger)):
        log_image(logger, "masks/fc.weight/mask", path, 3, "masks/fc.weight")
    wandb.log_image.assert_called_once_with("masks/fc.weight/mask", [str(path)], step=3)
    name, array, step = board.experiment.add_image.call_args.args
    assert (name, array.shape, step) == ("masks/fc.weight/mask", (image.height, image.width, 3), 3)
    mlflow.experiment.log_artifact.assert_called_once_with("id", str(path), "masks/fc.weight")
