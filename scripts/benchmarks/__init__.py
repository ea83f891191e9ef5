"""The benchmarks of the project, one file a part of the house.

Each file has a dict ``BENCHMARKS`` of names and functions; a function returns rows, each a ratio against a
baseline that was taken in turn in the same run.
"""
