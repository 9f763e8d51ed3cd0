"""Launches of a plan: the ordinary ones, and on a GPU those that Triton's C launcher repeats."""

import itertools

import pytest
import torch

from sparseflash.kernels.common import launch as module
from sparseflash.kernels.common.launch import Launch, launch
from tests.gpu_calls import GPU

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


pytestmark = GPU


@triton.jit
def add(A, List, Out, n, SIZE: tl.constexpr):
    """Out = A + List + n"""
    place = tl.arange(0, SIZE)
    tl.store(Out + place, tl.load(A + place) + tl.load(List + place) + n)


def numbers(offset: int = 0, device: str = "cuda") -> torch.Tensor:
    return torch.randn(64 + offset, device=device)[offset:]


def launched(launch: Launch, a: torch.Tensor, given: torch.Tensor, n: int = 3, layout=()) -> None:
    out = torch.empty_like(a)
    launch((a, out), lambda: ((1,), (a, given, out, n), {"SIZE": 64}), (given,), layout)
    assert torch.equal(out, a + given + n)


@pytest.mark.parametrize("static", [False, True])
def test_repeated_launches_follow_their_tensors(static):
    launch, given = Launch(add, static=static), numbers()
    for _ in range(3):
        launched(launch, numbers(), given if static else numbers())
    for offset in (1, 0, 1, 2):  # addresses that are no multiple of 16
        launched(launch, numbers(offset), given)


@triton.jit
def add_pair(A, Out, pair, SIZE: tl.constexpr):
    """Out = A * n + B, where pair = (B, n)"""
    place = tl.arange(0, SIZE)
    tl.store(Out + place, tl.load(A + place) * pair[1] + tl.load(pair[0] + place))


def test_repeated_launches_take_tuples_and_tensors_in_two_places():
    made = []
    for n in (1, 3, 16):
        launch = Launch(add_pair, static=True)
        for same in (True, True, False, False, True, True):
            a, out = numbers(), numbers()
            b = a if same else numbers()

            def arguments(a=a, b=b, out=out, n=n):
                made.append(same)  # noqa: B023
                return (1,), (a, out), {"pair": (b, n), "SIZE": 64}

            launch((a, b, out), arguments)
            torch.testing.assert_close(out, a * n + b)
    assert made == 3 * [True, False]  # what was recorded for two tensors fits one as well


def test_tensors_of_another_device_are_computed_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for _ in range(3):
        launch, given = Launch(add, static=True), numbers(device="cuda:1")
        for _ in range(2):
            launched(launch, numbers(device="cuda:1"), given)


def test_repeats_without_a_plan_follow_their_arguments(monkeypatch):
    monkeypatch.setattr(module, "_launches", {})
    dtypes = torch.float32, torch.float16
    for _ in range(4):
        for n, offset, dtype in itertools.product((1, 16, 17), (0, 1, 2), dtypes):
            a, given = numbers(offset).to(dtype), numbers().to(dtype)
            out = torch.empty(64 + offset, dtype=dtype, device="cuda")[offset:]
            launch(add, (1,), a, given, out, n, SIZE=64)
            torch.testing.assert_close(out, a + given + n)
    assert len(module._launches) == 6
    assert all(any(made._repeats.values()) for made in module._launches.values())


def test_graphs_capture_repeats_without_a_plan(monkeypatch):
    monkeypatch.setattr(module, "_launches", {})
    a, given, out = numbers(), numbers(), numbers()
    for _ in range(3):
        launch(add, (1,), a, given, out, 3, SIZE=64)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(add, (1,), a, given, out, 3, SIZE=64)
    for _ in range(2):
        a.normal_()
        graph.replay()
        assert torch.equal(out, a + given + 3)
