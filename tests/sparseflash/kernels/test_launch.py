"""Launches of a plan: the ordinary ones, and on a GPU those that Triton's C launcher repeats."""

import pytest
import torch

from sparseflash.kernels import launch as module
from sparseflash.kernels.launch import Launch

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")


class Kernel:
    """Stands for a Triton kernel: it keeps what it is launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, args, options))


both = pytest.mark.parametrize("static", [False, True])


@both
def test_every_call_launches_with_its_own_tensors(static):
    kernel, lists = Kernel(), (torch.ones(2), None)
    launch = Launch(kernel, static=static)
    for n in range(2):
        a, b = torch.full((3,), n), None
        arguments = (4, 2), (a, lists[0], b, n), {"BLOCK": 32}
        launch((a, b), lambda arguments=arguments: arguments, lists)
        grid, args, options = arguments
        assert kernel.launches[-1] == (grid, args, options | {"enable_fp_fusion": True})


@both
def test_argument_that_is_not_announced_is_refused(static):
    """Its address would go stale when the launch is repeated."""
    a, b, lists = torch.ones(2), torch.ones(2), torch.ones(2)
    launch = Launch(Kernel(), static=static)
    with pytest.raises(ValueError, match="argument 2 of the kernel"):
        launch((a,), lambda: ((1,), (a, lists, b, 1), {}), (lists,))


# ---- on a GPU


def on_gpu(test):
    skip = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
    return pytest.mark.gpu(skip(test))


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


@on_gpu
@both
def test_repeated_launches_follow_their_tensors(static):
    launch, given = Launch(add, static=static), numbers()
    for _ in range(3):
        launched(launch, numbers(), given if static else numbers())
    for offset in (1, 0, 1, 2):  # addresses that are no multiple of 16
        launched(launch, numbers(offset), given)


@on_gpu
def test_layouts_have_launches_of_their_own_not_without_end():
    launch, given = Launch(add, static=True), numbers()
    for n in (3, 4, 3, 4, *range(2 * module._MAX_REPEATS)):
        launched(launch, numbers(), given, n, layout=n)
        assert len(launch._repeats) <= module._MAX_REPEATS


@on_gpu
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


@on_gpu
def test_tensors_of_another_device_are_computed_there():
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    for _ in range(3):
        launch, given = Launch(add, static=True), numbers(device="cuda:1")
        for _ in range(2):
            launched(launch, numbers(device="cuda:1"), given)
