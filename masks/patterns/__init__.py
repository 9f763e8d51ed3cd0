"""The patterns, one family a file; `masks` exports what each file lists in `__all__`."""
