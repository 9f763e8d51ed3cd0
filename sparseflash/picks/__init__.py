"""Attention to key blocks that each query picks for itself."""
