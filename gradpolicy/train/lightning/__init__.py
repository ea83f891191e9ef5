"""Policies under Lightning: the callback, strategies, checkpoints, resume, and callbacks that stop runs."""
