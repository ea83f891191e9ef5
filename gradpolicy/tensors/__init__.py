"""Masks as values, seeded draws, and sharded tensors."""
