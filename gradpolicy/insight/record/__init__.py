"""The record of a run: what policies did at each step that counts, as a file and as a table.

>>> import tempfile
>>> from pathlib import Path
>>> from gradpolicy.insight import record
>>> run = Path(tempfile.mkdtemp())
>>> _ = (run / "record.jsonl").write_text('{"kind": "freeze", "step": 5, "parameter": "a", "active_share": 0.5}\\n')
>>> record.load(run).query("kind == 'freeze'")[["step", "parameter", "active_share"]]
   step parameter  active_share
0     5         a           0.5
"""

from gradpolicy.insight.record.callback import Record
from gradpolicy.insight.record.record_file import load

__all__ = ["Record", "load"]
