import dataclasses
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gradpolicy import PolicyError, When


def test_phase_and_unit_decide_what_counts():
    assert When().active(step=0)
    assert When().active(phase="fit", step=10**6)
    assert not When().active(phase="test")
    epochs = When(start=2, unit="epoch")
    assert not epochs.active(step=100, epoch=1)
    assert epochs.active(step=0, epoch=2)
    # Outside of fitting only the phase counts.
    outside = When(phases=("test", "predict"), start=100)
    assert outside.active(phase="test", step=0)
    assert not outside.active(phase="fit", step=200)
    assert When(phases="validate") == When(phases=["validate"])


@given(start=st.integers(0, 20), length=st.integers(1, 20), every=st.integers(1, 5), step=st.integers(0, 50))
def test_it_holds_at_the_steps_of_a_range(start, length, every, step):
    when = When(start=start, stop=start + length, every=every)
    assert when.active(step=step) == (step in range(start, start + length, every))


def test_it_is_a_value():
    when = When(phases=("fit", "test"), start=2)
    assert pickle.loads(pickle.dumps(when)) == when
    assert hash(when) == hash(When(phases=("fit", "test"), start=2))
    with pytest.raises(dataclasses.FrozenInstanceError):
        when.start = 3


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"phases": ("fitt",)}, "when.phases: unknown phase 'fitt'; did you mean 'fit'?"),
        ({"unit": "steps"}, "when.unit: unknown unit 'steps'; did you mean 'step'"),
        ({"start": -1}, "when.start: expected an integer of at least 0, got -1"),
        ({"start": 1.5}, "when.start: expected an integer"),
        ({"every": 0}, "when.every: expected an integer of at least 1, got 0"),
        ({"every": True}, "when.every: expected an integer"),
        ({"start": 5, "stop": 5}, r"when.stop: expected an integer above start \(5\), got 5"),
    ],
)
def test_wrong_input_names_the_key(arguments, message):
    with pytest.raises(PolicyError, match=message):
        When(**arguments)
