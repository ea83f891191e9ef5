"""Policies under training libraries other than Lightning: one module each."""
