"""Native CPU kernels: C++ compiled at first use, called through ctypes."""
