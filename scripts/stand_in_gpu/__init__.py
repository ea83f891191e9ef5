"""A driver that takes the place of CUDA's, so that Triton compiles and launches where there is no GPU.

All is as on a GPU up to the call that would start a kernel: what it is compiled to, which arguments that
presumes to be multiples of 16, how they are handed over. Then a function of the caller's has the launch.
"""
