"""What stands right of `>>`; `masks` exports what each file lists in `__all__`."""
