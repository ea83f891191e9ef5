"""The parts of ``scripts/soak.py``: running and killing, comparing."""
