"""Fixed masks: by pattern, by tensor, from a file."""

import pytest
import torch
from safetensors.torch import save_file

import gradpolicy as gp
from gradpolicy.errors import PolicyError


@pytest.mark.parametrize("mask", ["head.*", ["*", "!embed.*", "!blocks.*"]])
def test_globs_say_what_trains(prepared, trained, mask) -> None:
    masks = prepared(gp.masks.Fixed(mask)).masks(0, 0)
    assert trained(masks) == ["head.weight", "head.bias"]
    assert masks["embed.weight"] is False


def test_a_dict_gives_masks_by_name_or_glob_and_the_name_wins(prepared) -> None:
    rows = torch.tensor([[True], [False], [True]])
    masks = prepared(gp.masks.Fixed({"head.weight": rows, "head.*": False})).masks(5, 0)
    assert masks["head.weight"] is rows
    assert masks["head.bias"] is False
    assert masks["embed.weight"] is True


def test_a_tensor_is_for_every_parameter(prepared) -> None:
    mask = torch.tensor([[True, False, True, False]])
    source = prepared(gp.masks.Fixed(mask), {"a": torch.zeros(3, 4), "b": torch.zeros(1, 4)})
    assert all(torch.equal(given, mask) for given in source.masks(0, 0).values())


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8])
def test_a_safetensors_file_holds_masks(prepared, tmp_path, dtype) -> None:
    mask = torch.rand(3, 4) < 0.5
    save_file({"head.weight": mask.to(dtype)}, tmp_path / "masks.safetensors")
    for path in (tmp_path / "masks.safetensors", str(tmp_path / "masks.safetensors")):
        masks = prepared(gp.masks.Fixed(path)).masks(0, 0)
        assert torch.equal(masks["head.weight"], mask)
        assert masks["embed.weight"] is True


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        ("heads.*", "did you mean 'head"),
        ({"head.wieght": True}, "did you mean 'head.weight'"),
        (
            {"head.weight": torch.ones(2, 4, dtype=torch.bool)},
            r"shape \(2, 4\) does not broadcast to the parameter's \(3, 4\)",
        ),
        (
            {"head.weight": torch.ones(3, 4)},
            r"expected a bool tensor \(True = this entry trains\), got float32",
        ),
        ({"head.weight": 1.0}, "expected True, False, a bool tensor"),
        ("nowhere.safetensors", "Fixed.mask: nowhere.safetensors cannot be read"),
        ([1, 2], "expected a bool, globs"),
        ([], "Fixed.mask: is empty"),
        ({}, "Fixed.mask: is empty"),
    ],
)
def test_what_does_not_fit_is_an_error(prepared, mask, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        prepared(gp.masks.Fixed(mask))


@pytest.mark.parametrize(
    ("held", "message"),
    [({"head.weight": torch.ones(3, 4)}, "expected a bool tensor"), ({}, "has no mask")],
)
def test_a_file_must_hold_masks(prepared, tmp_path, held, message: str) -> None:
    save_file(held, tmp_path / "masks.safetensors")
    with pytest.raises(PolicyError, match=message):
        prepared(gp.masks.Fixed(tmp_path / "masks.safetensors"))


@pytest.mark.parametrize("kind", [gp.masks.Fixed, gp.masks.Rows])
def test_a_timetable_is_taken_and_said_to_make_no_difference(kind, recwarn):
    source = kind(True if kind is gp.masks.Fixed else 0, every=5, start=3)
    (warning,) = [str(found.message) for found in recwarn]
    assert warning.startswith(f"{kind.__name__}: every and start make no difference")
    assert "when=" in warning
    source.setup({"weight": torch.zeros(2, 2)}, seed=0)
    assert source.masks(0, 0) == source.masks(9, 1)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (gp.masks.Fixed(), "Fixed(mask=False)"),
        (gp.masks.Fixed({"a": True, "b": False}), "Fixed(mask='2 masks')"),
        (gp.masks.Fixed(torch.ones(3, 1, dtype=torch.bool)), "Fixed(mask='tensor (3, 1)')"),
    ],
)
def test_it_tells_what_was_given_in_short(source, text: str) -> None:
    assert repr(source) == text
