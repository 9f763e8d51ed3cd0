"""The door to the Triton kernels: triton is optional, and `import sparseflash` does not load it."""

from functools import cache
from types import ModuleType

import torch
from torch import Tensor


def on_nvidia(t: Tensor) -> bool:
    """Whether a tensor is on an NVIDIA GPU. On AMD's, where the kernels have never run, torch's
    functions do the work; to torch their tensors are CUDA tensors too.
    """
    return t.is_cuda and torch.version.hip is None


@cache
def kernels() -> ModuleType:
    """`sparseflash.select.kernels`, imported by the first call that needs it."""
    from sparseflash.select import kernels

    return kernels
