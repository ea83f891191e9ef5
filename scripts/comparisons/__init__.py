"""Families of experiments that are compared with each other over several seeds."""
