"""The record of a run: what policies did at each step that counts, as a file and as a table.

>>> import tempfile
>>> from pathlib import Path
>>> from gradpolicy.insight import record
>>> run = Path(tempfile.mkdtemp())
>>> numbers = '"step": 5, "epoch": 0, "active": [3], "entries": [4]'
>>> line = '{"kind": "freeze", "policy": "half", "parameter": ["fc.weight"], ' + numbers + "}\\n"
>>> _ = (run / "record.jsonl").write_text(line)
>>> record.load(run).query("kind == 'freeze'")[["step", "parameter", "active_share"]]
   step  parameter  active_share
0     5  fc.weight          0.75
"""

from gradpolicy.insight.record.record_callback import Record
from gradpolicy.insight.record.record_file import load

__all__ = ["Record", "load"]
