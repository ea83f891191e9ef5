"""Which part of a model to train: three tasks, and the methods compared on each."""
