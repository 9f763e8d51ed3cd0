"""What the backends ask of an NVIDIA GPU."""

from functools import cache

import torch


@cache
def nvidia_capability(device: torch.device) -> tuple[int, int] | None:
    """The compute capability of a device; None where it is not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip is not None:
        return None
    return torch.cuda.get_device_capability(device)


def told(capability: tuple[int, int] | None) -> str:
    """The end of a sentence that says which capability was asked for."""
    return "this is none" if capability is None else f"this one has {capability}"


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
