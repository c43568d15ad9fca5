"""Triton kernels of the decode and prefill step, one file an op. Importing this package needs torch and triton, no GPU."""
