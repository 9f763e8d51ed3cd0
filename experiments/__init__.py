"""Programs that use the library: run from a clone, as ``python -m experiments.<name>``."""
