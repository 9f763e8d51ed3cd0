"""The device that a program runs on."""

import os
import platform
import re
from pathlib import Path

import torch


def find_device(name: str | None) -> torch.device:
    """Return the device of an option `device=`; None: a GPU where there is one, else the CPU.

    Raises ValueError if there is no such device here.
    """
    count = torch.cuda.device_count()
    if name is None:
        return torch.device("cuda" if count else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={name!r}: choose from cpu, cuda, cuda:1, ...")
    if device.type == "cuda" and (device.index or 0) >= count:
        here = f"torch finds {count} GPUs here" if count else "torch finds no GPU here"
        raise ValueError(f"device={name!r}: {here}; give device=cpu or leave it out")
    return device


def device_name(device: str | torch.device) -> str:
    """Return the name of a device, with the number of threads for a CPU."""
    if torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(device)
    info = Path("/proc/cpuinfo")
    found = re.search(r"^model name\s*: (.*)$", info.read_text(), re.M) if info.exists() else None
    name = found[1].strip() if found else platform.processor() or platform.machine()
    return f"{name} ({torch.get_num_threads()} threads)"


def free_memory(device: torch.device) -> int:
    """Bytes that are free on a device."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
