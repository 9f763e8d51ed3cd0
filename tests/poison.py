"""Memory that nobody wrote holds NaN, so that a result that was left out shows."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch


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
