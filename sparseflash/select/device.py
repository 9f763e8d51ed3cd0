"""The door to the Triton kernels: triton is optional, and `import sparseflash` does not load it."""

from functools import cache
from types import ModuleType


@cache
def kernels() -> ModuleType:
    """`sparseflash.select.kernels`, imported by the first call that needs it."""
    from sparseflash.select import kernels

    return kernels
