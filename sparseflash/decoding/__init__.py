"""Attention of a few new queries against a cache of keys and values."""
