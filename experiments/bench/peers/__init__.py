"""Kernels of other libraries that are measured beside ours, each where it is installed."""
