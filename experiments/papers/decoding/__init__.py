"""Measuring decoding: cases, providers, the gate and the time."""
