"""Kernels in Gluon, Triton's lower level, for Hopper."""
