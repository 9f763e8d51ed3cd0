"""FlashAttention-4: what is missing, and the block lists that it gets."""

from dataclasses import replace
from types import SimpleNamespace

import torch

from experiments.bench import fa4
from experiments.bench.cases import CAUSAL, DENSE
from masks.interop.fa4 import BlockSparseTensors
from tests.experiments.bench.bench_cases import CASE, CPU

CUDA = torch.device("cuda")


def test_flash_attention_4_says_what_is_missing():
    provider = fa4.FlashAttention4()
    assert provider.unsupported(CASE, CPU, "forward") == "needs a CUDA device, not cpu"
    assert "takes bfloat16" in (provider.unsupported(CASE, CUDA, "forward") or "")
    if fa4.missing():
        half = replace(CASE, dtype="float16")
        assert "pip install flash-attn-4" in (provider.unsupported(half, CUDA, "forward") or "")


def test_flash_attention_4_gets_full_blocks_as_full_and_bits_for_partial_ones(monkeypatch):
    calls = []
    module = SimpleNamespace(
        BlockSparseTensorsTorch=BlockSparseTensors,
        flash_attn_func=lambda q, k, v, **options: calls.append(options) or (q, None),
    )
    monkeypatch.setattr(fa4.importlib, "import_module", lambda _: module)
    monkeypatch.setattr(fa4, "bit_lookup", lambda *sizes: sizes)

    def options(mask):
        q = torch.zeros(2, 4, 256, 16)
        case = replace(CASE, mask=mask, n_q=256, n_k=256)
        assert fa4.FlashAttention4().prepare(case, CPU)(q, q, q).shape == q.shape
        return calls.pop()

    assert options(DENSE) == {"deterministic": False}
    assert options(CAUSAL) == {"deterministic": False, "causal": True}
    found = options("random:0.5:block=32")
    lists = found["block_sparse_tensors"]
    assert "mask_mod" not in found and lists.block_size == (32, 32)
    assert not lists.mask_block_cnt.any() and set(lists.full_block_cnt.flatten().tolist()) == {4}

    found = options("local:40")
    code, bits = found["aux_tensors"]
    assert found["mask_mod"] == (32, 32, False, False)
    q, k = torch.meshgrid(torch.arange(256), torch.arange(256), indexing="ij")
    word = bits[code[0, 0, q // 32, k // 32].long(), q % 32, k % 32 // 32]
    assert torch.equal((word >> (k % 32) & 1).bool(), (q - k).abs() <= 40)
