"""The rates that devices reach in practice: known by name, or measured."""

import time
from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import NamedTuple

import torch


class Ceilings(NamedTuple):
    """Rates that a device reaches in practice."""

    matmul_tflops: Mapping[str, float]  # of a large matrix product, by dtype
    copy_tbs: float  # TB/s of a copy, bytes read and bytes written
    exp2_tps: float  # 1e12 exponentials a second
    source: str  # how and when this was found


# Kept by the name that the driver gives the device.
CEILINGS = {
    "NVIDIA H200": Ceilings(
        {"bfloat16": 790.0, "float16": 790.0},
        copy_tbs=4.27,
        exp2_tps=16 * 132 * 1.98e9 / 1e12,  # a clock and multiprocessor, of these, Hz
        source="torch.matmul of 8192 x 8192 and copy_ of 2 GiB, 2026-11-20; exp2 by its clock",
    )
}


def ceilings(name: str) -> Ceilings:
    """Return the ceilings of a device by its name; ValueError if CEILINGS does not have it."""
    if name not in CEILINGS:
        raise ValueError(
            f"no ceilings for {name!r}, only for {', '.join(CEILINGS)}; "
            "measure_ceilings(device) finds them"
        )
    return CEILINGS[name]


@lru_cache
def measure_ceilings(device: str, dtypes: tuple[str, ...] = ("bfloat16",)) -> Ceilings:
    """Return the measured ceilings of a device; measuring takes about a second, once in a process.

    The rate of exponentials is measured on a CPU. On a GPU it follows from the special-function
    units: 16 a clock and multiprocessor.
    """
    where = torch.device(device)
    size, copied = (8192, 2**30) if where.type == "cuda" else (1024, 2**26)
    rates = {}
    for dtype in dtypes:
        a, b = (torch.randn(size, size, device=where).to(getattr(torch, dtype)) for _ in range(2))
        rates[dtype] = 2 * size**3 / _seconds(lambda a=a, b=b: a @ b, where) / 1e12
    x = torch.ones(copied, dtype=torch.uint8, device=where)
    y = torch.empty_like(x)
    copy = 2 * copied / _seconds(lambda: y.copy_(x), where) / 1e12
    if where.type == "cuda":
        units = torch.cuda.get_device_properties(where).multi_processor_count
        clock = torch.cuda.clock_rate(where) * 1e6  # Hz, as the products above left it
        exp2 = 16 * units * clock / 1e12
    else:
        z = torch.randn(2**20)  # 4 MiB: a large share of it stays in the cache
        out = torch.empty_like(z)
        exp2 = z.numel() / _seconds(lambda: torch.exp2(z, out=out), where) / 1e12
    return Ceilings(rates, copy, exp2, "measured in this process")


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Return the time of the fastest of many calls.

    On a CPU, with all threads and with one. The threads of a busy machine wait for one another, up
    to a thousand times as long as a short call takes, and for a whole process at times.
    """
    if device.type == "cuda":

        def finished() -> None:
            call()
            torch.cuda.synchronize(device)

        return _fastest(finished)
    threads = torch.get_num_threads()
    times = [_fastest(call)]
    try:
        torch.set_num_threads(1)
        times.append(_fastest(call))
    finally:
        torch.set_num_threads(threads)
    return min(times)


def _fastest(call: Callable[[], object], repeats: int = 10, seconds: float = 0.1) -> float:
    """Return the shortest time of a call, of at least `repeats` calls and over `seconds`."""
    call()  # warm up: threads, caches, clocks
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < repeats or time.perf_counter() < end:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)
