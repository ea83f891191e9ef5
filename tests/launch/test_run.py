"""What a run prints, and what it leaves out."""

import warnings

from gradpolicy.launch.run import quieter

from .conftest import SHORT


def test_a_profilers_report_is_said(train, caplog) -> None:
    ended = train(*SHORT, "debug=profiler", quick=False)
    assert ended.code == 0
    assert "Profiler Report" in caplog.text


def test_a_warning_is_one_line_without_its_place_in_the_code() -> None:
    before = warnings.formatwarning
    with quieter():
        line = warnings.formatwarning("no\n  value", UserWarning, "run.py", 1)
    assert line == "warning: no value\n"
    assert warnings.formatwarning is before
