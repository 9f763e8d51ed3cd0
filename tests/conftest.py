"""Settings of all tests.

Without a GPU the Triton kernels run in Triton's interpreter, which has to be asked for before
triton is imported.
"""

import gc
import os
import resource
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import pytest
import torch

from tests.poison import poisoned_empty

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"
    if find_spec("triton"):
        from tests.interpreter import faster

        faster.hasten()

# To start a pool of processes, and to compile C++ for each kind of vectors, takes ten seconds each.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as in a job that a script starts with &
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items):
    """Slow tests first, lest one process runs them while the others have nothing left to do."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish():
    """Modules and tests are no garbage: no later collection looks at them, which takes long."""
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter):
    """Say in one line what does not run without a GPU."""
    if not torch.cuda.is_available():
        terminalreporter.write_line("tests/gpu is not collected: it needs a CUDA GPU")


def pytest_unconfigure():
    gc.unfreeze()


@pytest.fixture(autouse=True, scope="module")
def little_to_collect():
    """What outlives the tests of a file is no garbage either: programs collect before they time."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def nan_in_what_nobody_writes():
    with poisoned_empty():
        yield


@pytest.fixture(autouse=True)
def empty_cache():
    """Tests change what plans depend on: each begins without the plans of the others."""
    from sparseflash import clear_cache

    clear_cache()


@pytest.fixture
def no_interpreter(monkeypatch):
    """Calls on a CPU take its own backend, as a user's do, not Triton's interpreter."""
    # not the environment: kernels, and this answer, keep what holds when they are imported
    monkeypatch.setattr("sparseflash.backends.triton.interpreted", lambda: False)


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture
def own_patterns():
    """Patterns that a test registers are forgotten after it."""
    from masks.registry import PATTERNS

    before = dict(PATTERNS)
    yield
    PATTERNS.clear()
    PATTERNS.update(before)


@pytest.fixture
def no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every `build` of a mask builds."""
    from masks.build import Cache

    monkeypatch.setattr("masks.build.cache", Cache(max_items=1, max_bytes=1))


@contextmanager
def _full_disk(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond `size` bytes.

    Bytecode is not written meanwhile: Python would leave a truncated file beside a module that is
    imported here for the first time, and every later import of it would fail.
    """
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    writes = sys.dont_write_bytecode
    sys.dont_write_bytecode = True
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        sys.dont_write_bytecode = writes


@pytest.fixture
def full_disk():
    """Return a context in which the disk is full."""
    return _full_disk
