"""Triton's interpreter in tests does what it does by itself, in less time."""

import inspect

import pytest
import torch

tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing interprets")


@triton.jit
def twice(x):
    return x + x


@triton.jit
def doubling_kernel(X, SUM: tl.constexpr):
    at = tl.arange(0, 4)
    x = twice(tl.load(X + at))
    tl.store(X + at, tl.zeros([4], tl.float32) + tl.sum(twice(x)) if SUM else x)


def members() -> list[tuple[object, str, object]]:
    owners = tl, tl.math, tl.tensor, tl.dtype
    return [(owner, *pair) for owner in owners for pair in inspect.getmembers(owner)]


def changed(before) -> list[str]:
    pairs = zip(before, members(), strict=True)
    return [a[1] for a, b in pairs if a[2] is not b[2] and a[2] != b[2]]


def test_a_launch_finds_the_builtins_and_leaves_them_as_they_were():
    before = members()
    for summed, wanted in ((False, [2, 4, 6, 8]), (True, [40] * 4), (False, [2, 4, 6, 8])):
        x = torch.arange(1.0, 5)
        doubling_kernel[(1,)](x, SUM=summed)
        assert x.tolist() == wanted
    assert changed(before) == []


def test_a_launch_that_fails_leaves_them_too():
    before = members()
    with pytest.raises(Exception, match="ptr"):
        doubling_kernel[(1,)](3, SUM=False)
    assert changed(before) == []
    test_a_launch_finds_the_builtins_and_leaves_them_as_they_were()
