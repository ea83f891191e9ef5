"""The same in loops that numba compiles, where there is no C compiler."""
