"""The parts of ``scripts/fuzz.py``: mutations, running, judging."""
