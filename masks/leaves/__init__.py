"""Base classes of the patterns, and the geometry that they share."""
