"""How loops over entries become machine code: C by a compiler, Python by numba, Triton kernels on a GPU."""
