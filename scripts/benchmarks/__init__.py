"""The benchmarks of the project, one file per part of the package.

Each file has a dict ``BENCHMARKS`` of names and functions. A function returns rows, each a ratio to a
baseline that was timed alternately in the same run.
"""
