"""FlashAttention-4: what is missing, and the block lists that it gets."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from experiments.bench.cases import CAUSAL, DENSE
from experiments.bench.peers import fa4
from experiments.bench.providers import find
from masks.interop.fa4 import BlockSparseTensors
from tests.experiments.bench.bench_cases import CASE, CPU

CUDA = torch.device("cuda")


def test_flash_attention_4_says_what_is_missing():
    peer = find("fa4")
    assert peer.unsupported(CASE, CPU, "forward") == "needs a CUDA device, not cpu"
    assert "takes bfloat16" in (peer.unsupported(CASE, CUDA, "forward") or "")
    if peer.missing():
        half = replace(CASE, dtype="float16")
        assert "pip install flash-attn-4" in (peer.unsupported(half, CUDA, "forward") or "")


@pytest.fixture
def calls(monkeypatch):
    """What the functions of FlashAttention-4 are called with: name, shape of q, options."""
    found = []

    def function(name):
        return lambda q, k, v, **options: found.append((name, q.shape, options)) or (q, None)

    names = ("flash_attn_func", "flash_attn_varlen_func")
    module = SimpleNamespace(
        BlockSparseTensorsTorch=BlockSparseTensors, **{name: function(name) for name in names}
    )
    monkeypatch.setattr(fa4.importlib, "import_module", lambda _: module)
    return found


@pytest.mark.parametrize(
    ("mask", "window"),
    [
        ("sliding(5)", (4, 0)),
        ("local(3, 7)", (3, 7)),
        ("causal()", (None, 0)),
        ("local(300, 0)", (None, 0)),
        ("local(3) | global_tokens(1)", None),
        (DENSE, None),
    ],
)
def test_windows_have_their_own_arguments(mask, window, calls):
    case = replace(CASE, mask=mask)
    assert case.window == window
    peer = find("fa4_window")
    assert peer.concerns(case) == (window is not None and mask != CAUSAL)
    assert replace(case, n_k=100).window is None
    if window is not None:
        q = torch.zeros(2, 4, 200, 16)
        peer.prepare(case, CPU)(q, q, q)
        assert calls == [("flash_attn_func", (2, 200, 4, 16), calls[0][2])]
        assert calls[0][2] == {"deterministic": False, "window_size": window}


@pytest.mark.parametrize("causal", [False, True])
def test_packed_documents_of_all_batch_entries_are_joined(causal, calls):
    mask = "documents((80, 0, 120))" + " & causal()" * causal
    case = replace(CASE, mask=mask, layout="token_major")
    peer = find("fa4_varlen")
    assert case.documents == (80, 0, 120) and peer.concerns(case)
    q = torch.zeros(2, 200, 4, 16).transpose(1, 2)
    assert peer.prepare(case, CPU)(q, q, q).shape == q.shape
    name, shape, options = calls.pop()
    assert (name, shape) == ("flash_attn_varlen_func", (400, 4, 16))
    for which in "qk":
        ends = options[f"cu_seqlens_{which}"]
        assert ends.dtype == torch.int32 and ends.tolist() == [0, 80, 80, 200, 280, 280, 400]
        assert options[f"max_seqlen_{which}"] == 120
    assert options["causal"] == causal
    half = replace(case, dtype="float16", layout="head_major")
    assert "layout=token_major" in (peer.unsupported(half, CUDA, "forward") or "")


@pytest.mark.parametrize(
    "mask", [DENSE, "documents((80, 100))", "documents((80, 120)) | local(3)", "sliding(3)"]
)
def test_other_masks_are_no_documents(mask):
    assert not find("fa4_varlen").concerns(replace(CASE, mask=mask))


def test_flash_attention_4_gets_full_blocks_as_full_and_bits_for_partial_ones(calls, monkeypatch):
    monkeypatch.setattr(fa4, "bit_lookup", lambda *sizes: sizes)

    def options(mask):
        q = torch.zeros(2, 4, 256, 16)
        case = replace(CASE, mask=mask, n_q=256, n_k=256)
        assert find("fa4").prepare(case, CPU)(q, q, q).shape == q.shape
        return calls.pop()[2]

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
