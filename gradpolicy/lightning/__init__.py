"""Policies under Lightning: the callback, strategies, checkpoints, resume, and guards of a run."""
