"""The same in Triton kernels, on a GPU."""
