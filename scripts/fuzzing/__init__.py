"""The parts of ``scripts/fuzz.py``: damaged files, wrong values, and running them in a fork."""
