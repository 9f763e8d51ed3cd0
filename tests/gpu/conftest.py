"""Fixtures of the tests that need a GPU."""

import pytest
import torch


@pytest.fixture(params=["triton", "hopper"])
def backend(request) -> str:
    """The backends with kernels; a GPU that is no Hopper has one of them."""
    if request.param == "hopper" and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    return request.param


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
