"""Masked Adam and the moves that masks need on a CPU, in C."""
