"""Where the Triton kernels run that make masks and lists."""

from types import SimpleNamespace

import pytest
import torch

from sparseflash.kernels.device import on_nvidia


@pytest.mark.parametrize(
    ("is_cuda", "hip", "expected"),
    [(True, None, True), (True, "6.4", False), (False, None, False)],
)
def test_kernels_run_on_nvidia_gpus_only(is_cuda, hip, expected, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    assert on_nvidia(SimpleNamespace(is_cuda=is_cuda)) == expected  # pyright: ignore
