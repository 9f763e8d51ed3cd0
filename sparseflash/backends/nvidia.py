"""What the backends ask of a GPU."""

from functools import cache

import torch


@cache
def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """Return the compute capability of a device; None where it is not an NVIDIA GPU.

    ROCm reports numbers of the same form for AMD's GPUs, so they are not asked for there.
    """
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def told(capability: tuple[int, int] | None) -> str:
    """Return the end of a sentence that says which compute capability was asked for."""
    return "this is an AMD GPU" if capability is None else "this one has {}.{}".format(*capability)


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
