"""Memory that nobody wrote holds NaN, so that a result that was left out shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch

with torch.device("cpu"):  # torch looks its factories up at the first use of a device's context,
    torch.empty(0)  # which would not know those that are replaced below


@contextmanager
def poisoned_empty() -> Iterator[None]:
    """What torch.empty and its like return, and Tensor.new_empty, is full of NaN.

    Without it, memory that a call left out may well hold the same values from the call before.
    """
    with (
        mock.patch.object(torch, "empty", _poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", _poisoned(torch.empty_like)),
        mock.patch.object(torch, "empty_strided", _poisoned(torch.empty_strided)),
        mock.patch.object(torch.Tensor, "new_empty", _poisoned(torch.Tensor.new_empty)),
    ):
        yield


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def made(*args, **kwargs):
        tensor = make(*args, **kwargs)
        if tensor.is_floating_point() and type(tensor) is torch.Tensor:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return made


def surrounded(t: torch.Tensor) -> torch.Tensor:
    """t (B, H, N, D) as the middle of a larger tensor of NaN, in the same order in memory.

    There are NaN before and behind it in every axis: of tokens more than a block has.
    """
    pads = (1, 1, 260, 8)  # of columns as many as leave addresses aligned
    token_major = t.stride(1) < t.stride(2)
    order = [0, 2, 1, 3] if token_major else [0, 1, 2, 3]
    shape = [n + 2 * pad for n, pad in zip(t.shape, pads, strict=True)]
    around = t.new_full([shape[i] for i in order], float("nan")).permute(order)
    middle = around[tuple(slice(pad, -pad) for pad in pads)]
    return middle.copy_(t)
