"""The kernels in Triton."""
