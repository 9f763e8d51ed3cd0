"""Providers say where they cannot run, and get the mask of the case."""

from dataclasses import replace

import pytest
import torch

from experiments.bench import providers
from sparseflash.testing import make_qkv
from tests.experiments.bench.bench_cases import CASE, CPU, exact


def test_sdpa_says_where_it_cannot_run():
    find = providers.find
    assert "dense only" in find("sdpa").unsupported(CASE, CPU, "forward")
    dense = replace(CASE, mask="dense")
    assert "CUDA" in find("sdpa_flash").unsupported(dense, CPU, "forward")
    assert "no backward" in find("flex").unsupported(dense, CPU, "backward")


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gets_the_same_mask(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    q, k, v = make_qkv(2, 4, 200, 200, 16, kv_heads=2, dtype=torch.float32, device=CPU)
    out = providers.find("flex").prepare(CASE, CPU)(q, k, v)
    torch.testing.assert_close(out, exact(CASE)(q, k, v), rtol=1e-5, atol=1e-5)
    # Whole blocks have nothing to look up.
    whole = replace(CASE, mask="random:0.5:block=32", n_q=192, n_k=192)
    q, k, v = make_qkv(2, 4, 192, 192, 16, kv_heads=2, dtype=torch.float32, device=CPU)
    seen = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_, **kw: seen.append(kw))
    providers.find("flex").prepare(whole, CPU)(q, k, v)
    assert seen[0]["block_mask"].mask_mod.__name__ == "noop_mask"
