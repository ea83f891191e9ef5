"""Policies under other training libraries than Lightning: one module each."""
