"""Launches of a plan, as far as they go without a GPU; tests/gpu has the repeated ones."""

import pytest
import torch

from sparseflash.kernels.launch import Launch

pytest.importorskip("triton")


class Kernel:
    """Stands for a Triton kernel: it keeps what it is launched with."""

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args, **options: self.launches.append((grid, args, options))


def test_every_call_launches_with_its_own_tensors():
    kernel, lists = Kernel(), (torch.ones(2), None)
    for static in (True, False):
        launch = Launch(kernel, static=static)
        for n in range(2):
            a, b = torch.full((3,), n), None
            arguments = (4, 2), (a, lists[0], b, n), {"BLOCK": 32}
            launch((a, b), lambda arguments=arguments: arguments, lists)
            assert kernel.launches[-1] == arguments


@pytest.mark.parametrize("static", [False, True])
def test_argument_that_is_not_announced_is_refused(static):
    """Its address would go stale when the launch is repeated."""
    a, b, lists = torch.ones(2), torch.ones(2), torch.ones(2)
    launch = Launch(Kernel(), static=static)
    with pytest.raises(ValueError, match="argument 2 of the kernel"):
        launch((a,), lambda: ((1,), (a, lists, b, 1), {}), (lists,))
