import math
import pickle

import pytest
from hydra.utils import instantiate
from omegaconf import OmegaConf

import gradpolicy as gp
from gradpolicy.schedules import Constant, Cosine, Cubic, Exponential, Ganin, Linear

SCHEDULES = [
    Constant(0.3),
    Linear(1.0, 5.0, 10),
    Cosine(1.0, 0.0, 10),
    Cubic(1.0, 0.1, 10),
    Exponential(1.0, 0.01, 10),
    Ganin(10, 100),
]


CURVES = {
    Linear: lambda passed: 1 - passed,
    Cosine: lambda passed: (1 + math.cos(math.pi * passed)) / 2,
    Cubic: lambda passed: (1 - passed) ** 3,
}


@pytest.mark.parametrize("kind", CURVES)
@pytest.mark.parametrize(("start", "stop"), [(1.0, 0.1), (0.0, 0.5)])
def test_a_ramp_follows_its_curve(kind: type, start: float, stop: float) -> None:
    ramp = kind(start, stop, steps=40, begin=10)
    for count in range(60):
        passed = min(max((count - 10) / 40, 0), 1)
        assert ramp(count) == pytest.approx(stop + (start - stop) * CURVES[kind](passed), abs=1e-12)
    # Its ends are exact.
    assert (ramp(0), ramp(10), ramp(50), ramp(99)) == (start, start, stop, stop)


def test_exponential_keeps_the_ratio_and_ganin_is_the_papers_ramp():
    decay = Exponential(1.0, 0.001, steps=3)
    assert [decay(count) for count in range(4)] == pytest.approx([1.0, 0.1, 0.01, 0.001])
    ramp = Ganin(gamma=10, steps=200)
    for count in (0, 1, 50, 199, 200):
        assert ramp(count) == pytest.approx(2 / (1 + math.exp(-10 * count / 200)) - 1)
    assert Ganin(steps=10, begin=100)(50) == 0.0


@pytest.mark.parametrize("schedule", SCHEDULES, ids=repr)
def test_a_schedule_holds_its_last_value_gives_floats_and_can_be_pickled(schedule):
    last = schedule(getattr(schedule, "steps", 0))
    assert schedule(10**9) == last
    assert isinstance(last, float)
    assert pickle.loads(pickle.dumps(schedule)) == schedule
    assert len({schedule, pickle.loads(pickle.dumps(schedule)), Constant(9)}) == 2


def test_yaml_may_nest_a_schedule_within_a_rules_parameters():
    node = {
        "_target_": "gradpolicy.StraightThrough",
        "surrogate": "tanh",
        "parameters": {
            "slope": {"_target_": "gradpolicy.schedules.Linear", "start": 1, "stop": 2, "steps": 4}
        },
    }
    for config in (node, OmegaConf.create(node)):
        assert instantiate(config).rule.parameters == {"slope": Linear(1, 2, 4)}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Linear(0, 1, 0), r"Linear.steps: expected an integer of at least 1, got 0"),
        (lambda: Ganin(steps=1.5), "Ganin.steps: expected an integer"),
        (lambda: Constant("a"), "Constant.value: expected a finite number, got 'a'"),
        (lambda: Cosine(math.nan, 1, 1), "Cosine.start: expected a finite number"),
        (lambda: Exponential(-1, 1, 1), "Exponential: start and stop must be of one sign"),
        (lambda: Exponential(0, 1, 1), "Exponential: start and stop must be of one sign"),
        (lambda: Cubic(1.0, stp=0.1, steps=3), "Cubic: takes no argument 'stp'; did you mean 'stop'"),
    ],
)
def test_wrong_input_names_the_key(make, message):
    with pytest.raises(gp.PolicyError, match=message):
        make()
