"""Only some rows: new tokens, heads, any part of a tensor."""

import pytest
import torch

import gradpolicy as gp
from gradpolicy.errors import PolicyError

WIDTHS = {"w": torch.zeros(6, 4)}


def rows_of(source, parameters=None) -> list[bool]:
    source.setup(parameters or WIDTHS, seed=0)
    mask = source.masks(0, 0)["w"]
    assert mask.shape == (6, 1)
    return mask.flatten().tolist()


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([4, 5], [0, 0, 0, 0, 1, 1]),
        ("4:", [0, 0, 0, 0, 1, 1]),
        ([-1, 0], [1, 0, 0, 0, 0, 1]),
        (2, [0, 0, 1, 0, 0, 0]),
        ("1:6:2", [0, 1, 0, 1, 0, 1]),
        (":-4", [1, 1, 0, 0, 0, 0]),
        (["4:", 0], [1, 0, 0, 0, 1, 1]),
        (torch.tensor([1, 3]), [0, 1, 0, 1, 0, 0]),
        (torch.tensor([False, True, False, True, False, False]), [0, 1, 0, 1, 0, 0]),
    ],
)
def test_rows_by_number_and_slice(rows, expected: list[int]) -> None:
    assert rows_of(gp.masks.Rows(rows)) == [bool(flag) for flag in expected]


def test_heads_are_rows_of_a_size(prepared) -> None:
    assert rows_of(gp.masks.Rows([0, 2], size=2)) == [True, True, False, False, True, True]
    columns = prepared(gp.masks.Rows([1], dim=1, size=2), WIDTHS).masks(0, 0)["w"]
    assert columns.tolist() == [[False, False, True, True]]


def test_an_index_with_commas_means_that_part_of_the_tensor(prepared) -> None:
    """The ``[b, c, m:]`` of a tensor."""
    tensor = torch.zeros(2, 3, 5)
    for text, part in (
        ("1, 2, 3:", (1, 2, slice(3, None))),
        ("[1, 2, 3:]", (1, 2, slice(3, None))),
        ("0, :", (0,)),
        ("..., :2", (..., slice(2))),
        ((1, 2, slice(3, None)), (1, 2, slice(3, None))),
    ):
        expected = torch.zeros(2, 3, 5, dtype=torch.bool)
        expected[part] = True
        assert torch.equal(prepared(gp.masks.Rows(text), {"w": tensor}).masks(0, 0)["w"], expected)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"rows": [6]}, r"\[6\] does not fit 'w' of shape \(6, 4\): index 6 is out of bounds"),
        ({"rows": "7:"}, "'7:' leaves nothing of 'w'"),
        ({"rows": "::0"}, "'::0' is no number"),
        ({"rows": []}, "no row is given"),
        ({"rows": 0.5}, "expected numbers, a slice or an index, got 0.5"),
        ({"rows": "a:b"}, "'a:b' is no number"),
        ({"rows": [0], "dim": 2}, "has no dimension 2"),
        ({"rows": [0], "size": 4}, "cannot be cut into pieces of 4"),
        ({"rows": "1, 2, 3"}, "does not fit 'w'"),
        ({"rows": "1, 2", "dim": 1}, "neither dim nor size"),
        ({"rows": torch.tensor([True, False])}, "2 flags for the 6 rows"),
        ({"rows": torch.ones(6, 4, dtype=torch.bool)}, r"\[True, True, True, True\] is no number"),
        ({"rows": [2, 0, {"3": None}]}, 'an index is written as text: "2, 0, 3:"'),
        ({"rows": 0, "dim": "first"}, "Rows.dim: expected an integer, got 'first'"),
        ({"row": 0, "rows": 0}, "takes no argument 'row'; did you mean 'rows'"),
    ],
)
def test_rows_that_do_not_exist_are_errors(prepared, arguments: dict, message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        prepared(gp.masks.Rows(**arguments), WIDTHS)
