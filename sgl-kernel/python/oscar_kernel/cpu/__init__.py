"""The kernels in C++."""
