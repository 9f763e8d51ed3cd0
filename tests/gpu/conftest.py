"""Fixtures of the tests that need a GPU."""

import pytest
import torch

from sparseflash.cache import cache


@pytest.fixture(params=["triton", "hopper"])
def backend(request) -> str:
    """The backends with kernels; a GPU that is no Hopper has one of them."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return request.param


@pytest.fixture(autouse=True)
def counters_are_zero():
    """Between kernels: a number left there would make the next kernel pass over tiles."""
    yield
    counters = {
        key: entry.value for key, entry in cache._entries.items() if key[0] == "counter"  # pyright: ignore
    }  # fmt: skip
    for key, counter in counters.items():
        torch.cuda.synchronize()
        left = counter.tolist()
        counter.zero_()  # the next test has its own fault
        assert not any(left), f"{key} is {left}"
