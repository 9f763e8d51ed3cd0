"""Fixtures of the tests that need a GPU."""

import gc
from pathlib import Path

import pytest
import torch

from sparseflash.kernels.common import launch
from tests.gpu_calls import IS_HOPPER

if not torch.cuda.is_available():  # to collect two thousand tests and skip them takes its time
    RUN_ANYWHERE = "test_random_calls.py"
    collect_ignore = [p.name for p in Path(__file__).parent.glob("test_*.py")]
    collect_ignore.remove(RUN_ANYWHERE)


@pytest.fixture(params=["triton", "hopper"])
def backend(request) -> str:
    """The backends with kernels; a GPU that is no Hopper has one of them."""
    if request.param == "hopper" and not IS_HOPPER:
        pytest.skip("needs compute capability 9.0")
    return request.param


@pytest.fixture
def empty_gpu():
    """Starts and ends with the memory of earlier tests given back."""
    gc.collect()
    torch.cuda.empty_cache()
    yield
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def memory_for_other_workers():
    """Processes of pytest-xdist share a GPU: what one keeps for later, the others lack."""
    yield
    if torch.cuda.is_available() and torch.cuda.memory_reserved() > 2**30:
        torch.cuda.empty_cache()


@pytest.fixture(autouse=True)
def counters_are_zero():
    """Between kernels: a number left there would make the next kernel pass over tiles."""
    yield
    for key, counter in launch._counters.items():
        torch.cuda.synchronize()
        left = counter.tolist()
        counter.zero_()  # the next test has its own fault
        assert not any(left), f"{key} is {left}"
