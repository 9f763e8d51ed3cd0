"""Kernels read nothing around their inputs: calls of random extents and block sizes."""

import pytest

from sparseflash.select.kernels import picked
from tests import bounds_cases
from tests.attention_cases import DTYPES, LOW
from tests.gpu_calls import GPU

pytestmark = GPU


@pytest.mark.parametrize("seed", range(60))
def test_attention(seed, backend):
    bounds_cases.attention(seed, backend, "cuda", LOW if backend == "hopper" else DTYPES)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "joined"])
@pytest.mark.parametrize("seed", range(60))
def test_picks(seed, gathers, monkeypatch):
    monkeypatch.setattr(picked, "_gathers", lambda *given: gathers)
    bounds_cases.picks(seed, "cuda", DTYPES)


@pytest.mark.parametrize("seed", range(40))
def test_decode(seed):
    bounds_cases.decode(seed, "cuda", DTYPES[seed % 3])
