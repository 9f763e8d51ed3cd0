"""Triton's interpreter in tests does what it does by itself, in less time."""

import inspect

import pytest
import torch

tl = pytest.importorskip("triton.language")
triton = pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU nothing interprets")

DTYPES = (tl.int1, tl.int8, tl.uint8, tl.int32, tl.int64, tl.float16, tl.bfloat16, tl.float32)


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


def test_dtypes_are_those_of_the_table():
    from tests.interpreter import faster

    for dtype in DTYPES:
        pointer = tl.pointer_type(dtype)
        for given in (dtype, pointer, tl.block_type(dtype, [4]), tl.block_type(pointer, [4])):
            for _ in range(2):  # also once it is kept
                assert faster._np_dtype(given) == faster._table_of_dtypes(given)


def test_types_of_blocks_and_tensors_have_the_same_attributes():
    from tests.interpreter import faster

    def facts(check, cls, *given):
        made = cls.__new__(cls)
        check(made, *given)
        return {name: str(value) for name, value in vars(made).items() if name != "in_tensors"}

    for dtype in (*DTYPES, tl.pointer_type(tl.float16)):
        for shape in ([4], [2, 8], tl.tuple([tl.constexpr(16), tl.constexpr(1)])):
            for _ in range(2):
                block = facts(faster._init_block_type, tl.block_type, dtype, shape)
                assert block == facts(faster._check_block_type, tl.block_type, dtype, shape)
                given = "a handle", tl.block_type(dtype, shape)
                tensor = facts(faster._init_tensor, tl.tensor, *given)
                assert tensor == facts(faster._check_tensor, tl.tensor, *given)
    assert tl.block_type(tl.int32, [2, 2]).numel == 4
    for shape, message in (([3], "power of 2"), ([2, 2.0], "int"), ([], "0d")):
        for _ in range(2):
            with pytest.raises((TypeError, ValueError), match=message):
                tl.block_type(tl.int32, shape)
