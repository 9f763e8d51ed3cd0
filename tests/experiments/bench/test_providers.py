"""Providers say where they cannot run, and get the mask of the case."""

from dataclasses import replace

import pytest
import torch

from experiments.bench import providers
from experiments.bench.cases import LAYOUTS
from experiments.bench.step import draw
from sparseflash.testing import make_qkv
from tests.experiments.bench.bench_cases import CASE, CPU, exact


def test_sdpa_says_where_it_cannot_run():
    find = providers.find
    assert "dense only" in find("sdpa").unsupported(CASE, CPU, "forward")
    dense = replace(CASE, mask="dense")
    assert "CUDA" in find("sdpa_flash").unsupported(dense, CPU, "forward")
    assert "no backward" in find("flex").unsupported(dense, CPU, "backward")


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(
    ("name", "deterministic"),
    [("cpu", False), ("triton", False), ("hopper", False), ("hopper_deterministic", True)],
)
def test_ours_get_the_blocks_and_the_layout_of_the_case(name, deterministic, layout, monkeypatch):
    """A finer or coarser block mask, or a copy of q, gives the same result at another speed."""
    case = replace(CASE, layout=layout, block_k=64)
    seen = []

    def attention(q, k, v, mask, **options):
        seen.append((q.stride(), mask, options))
        return q

    monkeypatch.setattr(providers.sparseflash, "attention", attention)
    q, k, v = draw(case, CPU)
    providers.find(name).prepare(case, CPU)(q, k, v)
    strides, mask, options = seen[0]
    assert strides == q.stride() and mask is case.blocks and mask.block_size == (32, 64)
    backend = name.partition("_")[0]
    assert options == {"deterministic": deterministic, "backend": backend}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gets_the_same_mask(monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    q, k, v = make_qkv(  # with gradients, as steps have them
        2, 4, 200, 200, 16, kv_heads=2, dtype=torch.float32, device=CPU, requires_grad=True
    )  # fmt: skip
    out = providers.find("flex").prepare(CASE, CPU)(q, k, v)
    torch.testing.assert_close(out, exact(CASE)(q, k, v), rtol=1e-5, atol=1e-5)
    # Whole blocks have nothing to look up.
    whole = replace(CASE, mask="random:0.5:block=32", n_q=192, n_k=192)
    q, k, v = make_qkv(2, 4, 192, 192, 16, kv_heads=2, dtype=torch.float32, device=CPU)
    seen = []
    monkeypatch.setattr(torch, "compile", lambda *_, **__: lambda *_, **kw: seen.append(kw))
    providers.find("flex").prepare(whole, CPU)(q, k, v)
    assert seen[0]["block_mask"].mask_mod.__name__ == "noop_mask"
    assert seen[0]["block_mask"].BLOCK_SIZE == (32, 32)


def test_a_provider_of_the_users_own(monkeypatch, tmp_path):
    (tmp_path / "my_attention.py").write_text(
        "from experiments.bench.provider import Provider\n"
        "class Mine(Provider):\n"
        "    def prepare(self, case, device):\n"
        "        return lambda q, k, v: q\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(providers, "PROVIDERS", dict(providers.PROVIDERS))
    mine = providers.find("my_attention:Mine")
    assert mine.label == "Mine" and mine.prepare(CASE, CPU)(1, 2, 3) == 1 and not mine.own
    for name in ("my_attention:Yours", "no_such_module:Mine"):
        with pytest.raises(ValueError, match=f"providers='{name}'"):
            providers.find(name)
