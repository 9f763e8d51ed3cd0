"""FlashInfer: what is refused, and the blocks that it gets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.bench import provider
from experiments.bench.cases import DENSE, Case
from experiments.bench.peers import flashinfer
from experiments.bench.providers import find
from sparseflash.testing import make_qkv, oracle
from tests.experiments.bench.bench_cases import CPU, exact

CUDA = torch.device("cuda")
CASE = Case("random_blocks(0.5, block=64)", 1, 4, 4, 256, 192, 128, "bfloat16", 64, 64)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"mask": "random_blocks(count=64, block=64)", "n_k": 8192}, None),
        ({"dtype": "float16"}, "takes bfloat16, not float16"),
        ({"head_dim": 64}, "head dims of 128, not 64, 64"),
        ({"kv_heads": 2}, "as many key as query heads, not 4 and 2"),
        ({"batch": 2}, "one head_major sequence, not 2 head_major"),
        ({"layout": "token_major"}, "one head_major sequence, not 1 token_major"),
        ({"block_q": 128, "block_k": 128}, "blocks of 64 x 64"),
        ({"n_k": 200}, "blocks of 64 x 64, and whole ones at the ends"),
        ({"mask": "causal()"}, "whole blocks only, and the mask has partial ones"),
        ({"mask": "random_blocks(count=65, block=64)", "n_k": 8192}, "64 blocks, not 65 to 65"),
        ({"mask": "random_blocks(0.5, block=64) & ~global_rows(64)"}, "blocks, not 0 to 2"),
    ],
)  # fmt: skip
def test_flashinfer_says_what_it_does_not_take(changes, reason, monkeypatch):
    monkeypatch.setattr(provider, "nvidia_capability", lambda device: (9, 0))
    monkeypatch.setattr(flashinfer.FlashInfer, "missing", lambda self: None)
    found = find("flashinfer").unsupported(replace(CASE, **changes), CUDA, "forward")
    assert found is None if reason is None else reason in (found or "")


def test_flashinfer_has_no_backward_and_no_dense_form():
    peer = find("flashinfer")
    assert peer.directions == ("forward",)
    assert peer.concerns(CASE) and not peer.concerns(replace(CASE, mask=DENSE))


def test_flashinfer_without_the_manifest_of_its_kernels_says_so(monkeypatch):
    def manifest():
        raise FileNotFoundError(2, "No such file or directory", "/site/flashinfer/manifest.json")

    monkeypatch.setattr(flashinfer.importlib, "import_module", lambda _: kernels)
    monkeypatch.setattr(provider, "why_missing", lambda *_: None)
    kernels = SimpleNamespace(manifest=manifest)
    assert "packaged without manifest.json" in (find("flashinfer").missing() or "")
    kernels.manifest = dict
    assert find("flashinfer").missing() is None


class Wrapper:
    """`VariableBlockSparseAttentionWrapper` by its contract, computed densely."""

    def __init__(self, workspace, backend):
        assert workspace.dtype == torch.uint8 and backend == "cake_cute"

    def plan(self, kept, rows, cols, heads, kv_heads, head_dim, *, q_data_type):
        assert kept.dtype == torch.bool and kept.shape == (heads, rows.shape[1], cols.shape[1])
        assert rows.dtype == cols.dtype == torch.int32 and (rows == 64).all() and (cols == 64).all()
        assert heads == kv_heads == len(rows) == len(cols) and q_data_type == torch.bfloat16
        self.mask = kept.repeat_interleave(64, 1).repeat_interleave(64, 2)

    def run(self, q, k, v):
        assert q.ndim == 3
        return oracle(q[None], k[None], v[None], self.mask[None])[0][0].to(q.dtype)


@pytest.mark.parametrize("per_head", [False, True])
def test_flashinfer_gets_the_mask_of_the_case(per_head, monkeypatch):
    case = replace(CASE, mask=f"random_blocks(0.5, block=64, per_head={per_head})")
    module = SimpleNamespace(VariableBlockSparseAttentionWrapper=Wrapper)
    monkeypatch.setattr(flashinfer.importlib, "import_module", lambda _: module)
    q, k, v = make_qkv(1, 4, 256, 192, 128, dtype=torch.float32, device=CPU)
    out = find("flashinfer").prepare(case, CPU)(q, k, v)
    torch.testing.assert_close(out, exact(case)(q, k, v), rtol=1e-5, atol=1e-5)
