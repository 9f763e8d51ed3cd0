"""What the tests on a GPU share: where they run, inputs, calls with gradients, equality."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import chain, combinations, product

import pytest
import torch

import masks
from sparseflash.testing import make_qkv, relative_error

IS_HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
HOPPER = [pytest.mark.gpu, pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")]
RESULTS = ("out", "lse", "dq", "dk", "dv")
MASK = (masks.local(100) | masks.butterfly(64)) & masks.causal()
MIB = 2**20
LOW = [torch.bfloat16, torch.float16]
EPS = torch.finfo(torch.bfloat16).eps
SAME_BITS = {"deterministic": True}  # what a comparison of gradients bit by bit needs


def need_memory(n_bytes):
    free, _ = torch.cuda.mem_get_info()
    if free < n_bytes:
        pytest.skip(f"needs {n_bytes / 2**30:.0f} GiB of free GPU memory, {free / 2**30:.0f} are")


def inputs(length=512, dtype=torch.bfloat16, head_dim=64, **options):
    options = {"kv_heads": 2, "requires_grad": True} | options
    return make_qkv(2, 4, length, length, head_dim, dtype=dtype, device="cuda", **options)


def captured(step):
    """A graph of `step`, and what its replays leave in the results of `step`."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):  # compile the kernels and copy the schedule before the capture
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    return graph, results


def assert_follows(step, inputs, others):
    """A graph of `step` gives its results with the other inputs, which are written in place."""
    graph, results = captured(step)
    for fresh in others:
        for old, new in zip(inputs, fresh, strict=True):
            old.copy_(new)
        graph.replay()
        torch.cuda.synchronize()
        assert all(map(torch.equal, results, step()))


@contextmanager
def no_waiting() -> Iterator[None]:
    """What makes the host wait for the GPU is an error."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_equal(actual, expected, tolerance=None):
    """Bit by bit, or to a relative error below the tolerance; with the LSE or without."""
    names = RESULTS if len(actual) == len(RESULTS) else ("out", "dq", "dk", "dv")
    for name, a, e in zip(names, actual, expected, strict=True):
        same = torch.equal(a, e) if tolerance is None else relative_error(a, e) < tolerance
        assert same, f"{name} differs by {relative_error(a, e):.3g}"


def pairwise(**axes: Iterable[object]) -> pytest.MarkDecorator:
    """Parametrize a test by rows that together have every pair of values of two axes.

    axes: values by the name of an argument, or by those of several, as in "n_q, n_k".
    """
    values = [list(axis) for axis in axes.values()]
    left = {
        ((i, a), (j, b))
        for (i, first), (j, second) in combinations(enumerate(values), 2)
        for a, b in product(range(len(first)), range(len(second)))
    }
    rows = []
    while left:
        row = dict(min(left))
        for i in set(range(len(values))) - row.keys():
            new = partial(_new_pairs, left, dict(row), i)
            row[i] = max(range(len(values[i])), key=new)
        left -= set(combinations(sorted(row.items()), 2))
        parts = [values[i][row[i]] for i in range(len(values))]
        wide = [part if "," in name else (part,) for name, part in zip(axes, parts, strict=True)]
        rows.append(tuple(chain.from_iterable(wide)))
    return pytest.mark.parametrize(", ".join(axes), rows)


def _new_pairs(left: set, row: dict[int, int], i: int, a: int) -> int:
    """How many pairs of value `a` of axis i with those of the row are not there yet."""
    return sum(tuple(sorted(((i, a), other))) in left for other in row.items())
