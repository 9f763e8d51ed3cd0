"""Settings of all tests.

Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before
triton is imported.
"""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"


@pytest.fixture(autouse=True)
def poisoned_empty(monkeypatch):
    """Fill what torch.empty returns with NaN, so that an element that nobody writes shows."""

    def poison(make):
        def made(*args, **kwargs):
            tensor = make(*args, **kwargs)
            if tensor.is_floating_point() and type(tensor) is torch.Tensor:
                with torch.no_grad():
                    tensor.fill_(float("nan"))
            return tensor

        return made

    for name in ("empty", "empty_like", "empty_strided"):
        monkeypatch.setattr(torch, name, poison(getattr(torch, name)))


@pytest.fixture(autouse=True)
def no_known_calls():
    """A test changes what calls depend on, and would meet the calls of another one."""
    from sparseflash import calls

    calls.known.clear()


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
