"""Measuring attention to the key blocks that each query picked: cases, providers and the time."""
