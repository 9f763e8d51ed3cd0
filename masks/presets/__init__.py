"""Patterns as published code has them, quirks included, each under a name of its own."""
