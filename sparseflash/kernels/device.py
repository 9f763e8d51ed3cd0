"""The Triton kernels beside those of attention: which device they run on, and how they are loaded.
Nothing here loads triton before a tensor needs it.
"""

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib import import_module
from types import ModuleType

import torch
from torch import Tensor


def on_nvidia(t: Tensor) -> bool:
    """Whether a tensor is on an NVIDIA GPU. On AMD's, where the kernels have never run, torch's
    functions do the work; to torch their tensors are CUDA tensors too.
    """
    return t.is_cuda and torch.version.hip is None


def interpreted() -> bool:
    """Whether Triton runs kernels in its interpreter; it decides that once, when it is imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def on(device: torch.device) -> AbstractContextManager:
    """Make a GPU the current one; do nothing for the interpreter on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@cache
def kernels_of(room: str) -> ModuleType:
    """`sparseflash.ROOM.kernels`, imported by the first call: triton is optional."""
    return import_module(f"sparseflash.{room}.kernels")
