"""A random mask is a few numbers, and gives the same bits wherever it is made."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gradpolicy.errors import PolicyError
from gradpolicy.tensors.seeded_mask import RandomMask


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_gives_the_bits_of_the_cpu() -> None:
    mask = RandomMask(3, 40, "fc.weight", 0.3)
    assert torch.equal(mask.materialize((1000, 999), "cuda").cpu(), mask.materialize((1000, 999)))


@given(
    rows=st.integers(1, 12),
    columns=st.integers(1, 7),
    cut=st.tuples(st.integers(0, 12), st.integers(0, 12)),
    level=st.sampled_from(["entry", "row"]),
)
@settings(max_examples=40, deadline=None)
def test_a_shard_is_a_part_of_the_whole(rows: int, columns: int, cut: tuple[int, int], level: str) -> None:
    mask = RandomMask(1, 2, "w", 0.5, level)
    whole = mask.materialize((rows, columns))
    assert torch.equal(mask.materialize((rows, columns), start=cut[0], stop=cut[1]), whole[cut[0] : cut[1]])


@pytest.mark.parametrize(
    ("level", "shape"), [("entry", (6, 4, 3)), ("row", (6, 1, 1)), ("tensor", (1, 1, 1))]
)
def test_the_level_says_what_is_drawn_together(level: str, shape: tuple[int, ...]) -> None:
    assert RandomMask(0, 0, "w", 0.5, level).materialize((6, 4, 3)).shape == shape


def test_a_scalar_parameter_has_a_scalar_mask() -> None:
    assert RandomMask(0, 0, "temperature", 0.5).materialize(()).shape == ()


@pytest.mark.parametrize("density", [0.001, 0.1, 0.5, 0.9])
def test_the_density_is_met_and_entries_are_independent(density: float) -> None:
    """Counts, neighbours and successive draws stay within five standard deviations of independent coins."""
    count = 400_000
    first, second = (RandomMask(0, step, "w", density).materialize((count,)).double() for step in (0, 1))
    deviation = math.sqrt(density * (1 - density) / count)
    assert abs(first.mean().item() - density) < 5 * deviation
    bound = 5 * density * (1 - density) / math.sqrt(count)
    centred = first - density
    for other in (second - density, centred.roll(1), centred.roll(64), centred.roll(1000)):
        assert abs((centred * other).mean().item()) < bound


@pytest.mark.parametrize("other", [{"seed": 1}, {"step": 1}, {"name": "v"}])
def test_seed_step_and_name_each_change_the_mask(other: dict) -> None:
    plain = {"seed": 0, "step": 0, "name": "w", "density": 0.5}
    masks = [RandomMask(**arguments).materialize((64, 64)) for arguments in (plain, {**plain, **other})]
    assert 0.4 < (masks[0] == masks[1]).double().mean().item() < 0.6


def test_no_key_gives_a_shifted_copy_of_another() -> None:
    first = RandomMask(0, 0, "w", 0.5).materialize((1 << 12,))
    second = RandomMask(0, 1, "w", 0.5).materialize((1 << 12,))
    agreement = torch.stack([(first == second.roll(shift)).double().mean() for shift in range(1 << 9)])
    assert agreement.max().item() < 0.55


def test_densities_0_and_1_are_exact() -> None:
    assert not RandomMask(0, 0, "w", 0.0).materialize((1000,)).any()
    assert RandomMask(0, 0, "w", 1.0).materialize((1000,)).all()


def test_a_seeded_mask_survives_a_checkpoint(tmp_path) -> None:
    mask = RandomMask(7, 1200, "fc.weight", 0.25, "row")
    torch.save(mask.state(), tmp_path / "mask.pt")
    assert RandomMask.from_state(torch.load(tmp_path / "mask.pt", weights_only=True)) == mask


def test_a_wrong_seeded_mask_says_what_is_wrong() -> None:
    with pytest.raises(PolicyError, match="level"):
        RandomMask(0, 0, "w", 0.5, "rows")
    with pytest.raises(PolicyError, match="between 0 and 1"):
        RandomMask(0, 0, "w", 1.5)
    with pytest.raises(PolicyError, match=r"seeded mask \{'seed': 0\}: .*missing"):
        RandomMask.from_state({"seed": 0})


def test_the_same_numbers_give_the_same_mask_in_every_version() -> None:
    entries = RandomMask(0, 40, "fc.weight", 0.5).materialize((4, 8))
    drawn = ["".join("01"[bit] for bit in row) for row in entries.int().tolist()]
    assert drawn == ["10001000", "01110110", "00101000", "00101101"]
    rows = RandomMask(0, 40, "fc.weight", 0.5, "row").materialize((16, 8))
    assert "".join("01"[bit] for bit in rows.flatten().int().tolist()) == "1000100001110110"
