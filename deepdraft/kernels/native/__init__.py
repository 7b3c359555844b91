"""Products in CUDA C++: built at first use, beside the Triton kernels of `deepdraft.kernels`."""
