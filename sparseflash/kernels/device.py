"""Which device the Triton kernels beside those of attention run on. Nothing here loads triton."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


def on_nvidia(t: Tensor) -> bool:
    """Whether a tensor is on an NVIDIA GPU. On AMD's, where the kernels have never run, torch's
    functions do the work; to torch their tensors are CUDA tensors too.
    """
    return t.is_cuda and torch.version.hip is None


def on(device: torch.device) -> AbstractContextManager:
    """Makes a GPU the current one; nothing for the interpreter on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
