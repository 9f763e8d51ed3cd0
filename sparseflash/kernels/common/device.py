"""What is asked of a device, and how kernels beside those of attention are loaded.

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


@cache
def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a device; None where it is not an NVIDIA GPU.

    ROCm reports numbers of the same form for AMD's GPUs, so they are not asked for there.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def described(capability: tuple[int, int] | None) -> str:
    """Return the end of a sentence that says which compute capability was asked for."""
    return "this is an AMD GPU" if capability is None else "this one has {}.{}".format(*capability)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
