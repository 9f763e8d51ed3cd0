"""Kernels in the interpreter read nothing around their inputs."""

import pytest
import torch

from sparseflash.select.kernels import picked
from tests import bounds_cases
from tests.op_cases import INTERPRETED

pytestmark = INTERPRETED

DTYPES = torch.float32, torch.float16


@pytest.mark.parametrize("seed", [1, 3, 4, 7])
def test_attention(seed):
    bounds_cases.attention(seed, "triton", "cpu", DTYPES)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "joined"])
@pytest.mark.parametrize("seed", [4, 5, 6, 9])
def test_picks(seed, gathers, monkeypatch):
    monkeypatch.setattr(picked, "_gathers", lambda *given: gathers)
    bounds_cases.picks(seed, "cpu", DTYPES)


@pytest.mark.parametrize("seed", range(10, 14))
def test_decode(seed):
    bounds_cases.decode(seed, "cpu", DTYPES[seed % 2])
