"""Random masks: seeded, and changed by the timetable."""

import gradpolicy as gp


def test_the_density_follows_its_schedule(prepared) -> None:
    source = prepared(gp.masks.Random(density=gp.masks.Linear(1.0, 0.0, steps=8), every=2))
    given = [source.masks(step, 0)["head.bias"] for step in (0, 2, 5, 8)]
    densities = [mask if isinstance(mask, bool) else mask.density for mask in given]
    assert densities == [True, 0.75, 0.5, False]
