"""Fixtures of the tests that need a GPU."""

import sys

import pytest
import torch


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
    hopper = sys.modules.get("sparseflash.backends.hopper")
    for stream, counter in hopper.counters.items() if hopper else ():
        torch.cuda.synchronize()
        left = counter.tolist()
        counter.zero_()  # the next test has its own fault
        assert left == [0, 0], f"the counters of stream {stream} are {left}"
