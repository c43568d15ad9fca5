"""Micro-benchmark kernels of the probe: CUDA C++ compiled at run time by NVRTC. Importing this needs neither CUDA nor torch."""
