"""What a 2-bit cache costs in quality, measured through the pieces that serve: the kernels' store, plan and decode."""
