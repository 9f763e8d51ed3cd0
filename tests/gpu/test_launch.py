"""Launches that are repeated by Triton's C launcher alone, against ordinary ones."""

import pytest
import torch

from sparseflash.kernels import launch as module
from sparseflash.kernels.launch import Launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]


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


def test_layouts_have_launches_of_their_own():
    launch, given = Launch(add, static=True), numbers()
    for n in (3, 4, 3, 4):
        launched(launch, numbers(), given, n, layout=n)


def test_layouts_are_not_kept_without_end():
    launch, given = Launch(add, static=True), numbers()
    for n in range(2 * module._MAX_REPEATS):
        launched(launch, numbers(), given, n, layout=n)
        assert len(launch._repeats) <= module._MAX_REPEATS


def test_hooks_of_a_profiler_are_called():
    launch, given, seen = Launch(add, static=True), numbers(), []
    launched(launch, numbers(), given)
    hook = seen.append
    triton.knobs.runtime.launch_enter_hook.add(hook)
    try:
        launched(launch, numbers(), given)
    finally:
        triton.knobs.runtime.launch_enter_hook.remove(hook)
    launched(launch, numbers(), given)
    assert len(seen) == 1


def test_tensors_of_another_device_are_computed_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for _ in range(3):
        launch, given = Launch(add, static=True), numbers(device="cuda:1")
        for _ in range(2):
            launched(launch, numbers(device="cuda:1"), given)
