"""How much memory a run takes, and what to do where it is too much."""

import gc
import resource
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from experiments.common.devices import device_name
from experiments.lra.tasks.task import Task
from experiments.lra.training.config import Settings
from experiments.lra.training.distributed import Group

MIB = 2**20


def peak_mib(device: torch.device) -> float:
    """The most that was allocated on the device so far, data included; on a CPU, all of the
    process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def start(device: torch.device) -> None:
    """Frees what an earlier run of a sweep left, and counts the peak anew."""
    if device.type == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)


@contextmanager
def explained(settings: Settings, task: Task, group: Group) -> Iterator[None]:
    """Turns a lack of memory into a ValueError with the remedy."""
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        size = settings.batch // group.world
        piece = min(settings.micro_batch or size, size)
        remedy = f"micro_batch={piece // 2} adds up the gradients of smaller pieces"
        if piece == 1:
            remedy = "take a smaller model or a shorter task.max_length"
        raise ValueError(
            f"{piece} examples of {task.length} tokens at a time, beside the data, are too much for"
            f" the memory of {device_name(str(group.device))}: {remedy}"
        ) from error


def lacks_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # libraries of the GPU have words of their own: CUBLAS_STATUS_ALLOC_FAILED
    words = "out of memory", "can't allocate memory", "ALLOC_FAILED"
    return any(word in str(error) for word in words)
