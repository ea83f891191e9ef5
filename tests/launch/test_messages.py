"""One clear line for what libraries raise for wrong input."""

import errno

import pytest
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from gradpolicy.launch.messages import explain, full_disk


def test_what_hydra_cannot_build_is_one_line_with_its_key_and_the_cause() -> None:
    node = {"hydra": {"launcher": {"_target_": "fractions.Fraction", "numerator": "x"}}}
    with pytest.raises(InstantiationException) as failed:
        instantiate(node)
    assert "Invalid literal for Fraction: 'x'" in explain(failed.value)
    assert "full_key: hydra.launcher" in explain(failed.value)
    assert "\n" not in explain(failed.value)


def test_a_full_disk_is_named_whatever_error_came_of_it() -> None:
    full = OSError(errno.ENOSPC, "No space left on device", "/runs/a.csv")
    said = "nothing can be written to /runs/a.csv: no space left on device; make room"
    assert explain(full).startswith(said)
    later = RuntimeError("unexpected pos 64 vs 0")
    later.__context__ = full
    assert explain(later).startswith(said)
    assert full_disk(OSError(errno.ENOENT, "No such file")) is None
