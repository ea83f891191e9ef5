"""Random masks: seeded, and changed by the timetable."""

import gradpolicy as gp
from gradpolicy.tensors.seeded import RandomMask


def test_masks_are_seeded_by_seed_step_and_name(prepared) -> None:
    masks = prepared(gp.masks.Random(density=0.3, every=10, level="row"), seed=4).masks(27, 0)
    assert masks["head.weight"] == RandomMask(4, 20, "head.weight", 0.3, "row")


def test_the_density_follows_its_schedule(prepared) -> None:
    source = prepared(gp.masks.Random(density=gp.masks.Linear(1.0, 0.0, steps=8), every=2))
    given = [source.masks(step, 0)["head.bias"] for step in (0, 2, 5, 8)]
    densities = [mask if isinstance(mask, bool) else mask.density for mask in given]
    assert densities == [True, 0.75, 0.5, False]
