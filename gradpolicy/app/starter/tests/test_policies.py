"""The job learns, and its frozen weights keep their bits."""

import json
import subprocess
import sys
from pathlib import Path

PROJECT = Path(__file__).parents[1]


def test_the_job_learns_and_no_frozen_entry_has_changed(tmp_path: Path) -> None:
    """The run writes a report, and its audit finds no change."""
    place = f"paths.log_dir={tmp_path}"
    subprocess.run([sys.executable, str(PROJECT / "train.py"), "trainer.accelerator=cpu", place], check=True)
    (run,) = tmp_path.glob("my_project/runs/*")
    assert json.loads((run / "audit.json").read_text())["changed"] == 0
    assert json.loads((run / "result.json").read_text())["metrics"]["test/accuracy"] > 0.9
    assert (run / "report.html").is_file()
