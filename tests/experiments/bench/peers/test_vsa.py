"""FastVideo's block-sparse attention: what is refused, and the lists that it gets."""

from dataclasses import replace

import pytest
import torch

from experiments.bench import provider
from experiments.bench.cases import DENSE, Case
from experiments.bench.peers import vsa
from experiments.bench.providers import find
from sparseflash.testing import make_qkv, oracle
from tests.experiments.bench.bench_cases import CPU, exact

CUDA = torch.device("cuda")
OWN = "block_diagonal(64)"  # so that no row or column is empty
CASE = Case(f"random_blocks(0.5, block=64) | {OWN}", 2, 4, 4, 256, 256, 128, "bfloat16", 64, 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"head_dim": 64}, None),
        ({"dtype": "float16"}, "takes bfloat16, not float16"),
        ({"head_dim": 96}, "head dims of 64 and 128, not 96, 96"),
        ({"v_dim": 64}, "head dims of 64 and 128, not 128, 64"),
        ({"kv_heads": 2}, "as many key as query heads, not 4 and 2"),
        ({"layout": "token_major"}, "head_major tensors, not token_major"),
        ({"block_q": 128, "block_k": 128}, "blocks of 64 x 64"),
        ({"n_q": 250, "n_k": 250}, "blocks of 64 x 64, and whole ones at the ends"),
        ({"n_k": 512}, "as many keys as queries, not 512 and 256"),
        ({"mask": "causal()"}, "whole blocks only, and the mask has partial ones"),
        ({"mask": f"{OWN} & ~global_rows(64)"}, "rows and columns that have a block"),
        ({"mask": "global_rows(64)"}, "rows and columns that have a block"),
        ({"mask": "global_at((0,)) | sliding(1)"}, "whole blocks only"),
    ],
)
def test_vsa_says_what_it_does_not_take(changes, reason, monkeypatch):
    monkeypatch.setattr(provider, "nvidia_capability", lambda device: (9, 0))
    monkeypatch.setattr(provider, "why_missing", lambda *_: None)
    found = find("vsa").unsupported(replace(CASE, **changes), CUDA, "forward")
    assert found is None if reason is None else reason in (found or "")
    assert not find("vsa").concerns(replace(CASE, mask=DENSE))


class Kernels:
    """`vsa_cuda` by its contract, computed densely; the lists are checked."""

    def mask(self, index, counts, sizes):
        assert index.dtype == counts.dtype == sizes.dtype == torch.int32
        assert (sizes == 64).all() and len(sizes) == index.shape[3]
        assert index.is_contiguous() and counts.shape == index.shape[:3]
        place = torch.arange(index.shape[3])
        assert ((index >= 0) == (place < counts[..., None])).all() and (counts > 0).all()
        kept = torch.zeros(*index.shape[:3], index.shape[3] + 1, dtype=torch.bool)
        kept.scatter_(3, index.long() % (index.shape[3] + 1), True)
        return kept[..., :-1].repeat_interleave(64, 2).repeat_interleave(64, 3)

    def block_sparse_fwd(self, q, k, v, *lists):
        out, lse = oracle(q, k, v, self.mask(*lists))
        return out.to(q.dtype), lse.float()[..., None]

    def block_sparse_bwd(self, q, k, v, out, lse, dout, *lists):
        assert dout.is_contiguous() and lse.shape == (*q.shape[:3], 1)
        with torch.enable_grad():
            qkv = [t.detach().double().requires_grad_() for t in (q, k, v)]
            again, _ = oracle(*qkv, self.mask(*lists).mT)
        return torch.autograd.grad(again, qkv, dout.double())


@pytest.mark.parametrize("per_head", [False, True])
def test_vsa_gets_the_mask_of_the_case(per_head, monkeypatch):
    case = replace(
        CASE, mask=f"random_blocks(0.5, block=64, per_head={per_head}) | {OWN}", head_dim=16
    )
    monkeypatch.setattr(vsa.importlib, "import_module", lambda _: Kernels())
    q, k, v = make_qkv(2, 4, 256, 256, 16, dtype=torch.float32, requires_grad=True, device=CPU)
    out, expected = find("vsa").prepare(case, CPU)(q, k, v), exact(case)(q, k, v)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    dout = torch.randn_like(out)
    found, wanted = (torch.autograd.grad(o, (q, k, v), dout) for o in (out, expected))
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_missing_package_has_its_remedy():
    assert "pip install vsa==0.0.4" in (find("vsa").missing() or "pip install vsa==0.0.4")
