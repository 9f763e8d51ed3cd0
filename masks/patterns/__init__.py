"""The patterns, one family a file."""
