"""Transforms, the right side of `>>`; `masks` exports what each file lists in `__all__`."""
