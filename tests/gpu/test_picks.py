"""Attention to picked blocks on a GPU, against the float64 oracle."""

import pytest
import torch

import sparseflash
from sparseflash import select
from sparseflash.picks import kernels as picked
from sparseflash.testing import make_qkv, relative_error
from tests import picks_cases
from tests.gpu_calls import GPU, assert_follows
from tests.op_cases import NoSync
from tests.picks_cases import CASES, GATHERED, Case

pytestmark = GPU

ALL = CASES | GATHERED
LARGE = {
    "NSA": Case(32, 2, 2, 1000, 1000, 128, 128, 64, 8),
    "MSA": Case(16, 2, 2, 777, 777, 64, 128, 128, 3),
    "MoBA": Case(4, 2, 4, 1500, 1500, 64, 64, 256, 2),
    "DSA, one head for all": Case(64, 1, 1, 600, 600, 192, 128, 32, 6),
    "wide": Case(8, 2, 2, 300, 900, 256, 256, 16, 9),
    "whole tiles": Case(32, 2, 2, 1024, 1024, 128, 128, 64, 8),
    "whole tiles, heads side by side": Case(
        16, 4, 4, 500, 768, 64, 128, 32, 5, causal=False, token_major=True
    ),
    "odd": Case(6, 2, 2, 500, 513, 40, 24, 48, 4, causal=False),
    "fewer queries, for long lists": Case(2, 1, 1, 200, 4200, 64, 64, 16, 257),
}


@pytest.fixture(params=[True, False], ids=["gathered", "joined"])
def form(request, monkeypatch):
    """Both forms, whichever a call would choose."""
    monkeypatch.setattr(picked, "_gathers", lambda *given: request.param)


@pytest.mark.parametrize("name", ALL)
def test_small(name, form):
    picks_cases.check(ALL[name], "cuda")


@pytest.mark.parametrize("name", ["NSA", "MoBA", "wide", "odd"])
def test_both_forms(name, form):
    picks_cases.check(LARGE[name]._replace(dtype=torch.bfloat16), "cuda", seed=1)


@pytest.mark.parametrize("limit", [1, 3 * 4 * 500 * 4 * 40])
def test_slices_of_lists(limit, monkeypatch):
    monkeypatch.setattr(picked, "_LIMIT", limit)
    case = LARGE["odd"]._replace(dtype=torch.bfloat16, heads=6, lists=6)
    picks_cases.check(case, "cuda")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", LARGE)
def test_large(name, dtype):
    picks_cases.check(LARGE[name]._replace(dtype=dtype), "cuda")


@pytest.mark.parametrize("seed", range(40))
def test_random(seed):
    draw = torch.Generator().manual_seed(seed)

    def one(*choices):
        return choices[int(torch.randint(len(choices), (), generator=draw))]

    kv_heads, share, group = one(1, 2), one(1, 1, 2), one(1, 3, 4, 16)
    n_k = int(torch.randint(1, 700, (), generator=draw))
    case = Case(
        kv_heads * share * group, kv_heads, kv_heads * share, one(n_k, n_k, n_k // 2 + 1), n_k,
        one(16, 24, 64, 80, 128), one(16, 64, 128), one(16, 32, 48, 64, 128, 512), one(1, 3, 8),
        causal=one(True, True, False), dtype=one(torch.float32, torch.float16, torch.bfloat16),
    )  # fmt: skip
    picks_cases.check(case, "cuda", seed)


def test_more_lists_than_cuda_has_rows_of_programs():
    picks_cases.check(Case(1, 1, 1, 16, 16, 16, 16, 16, 1, batch=2**16), "cuda")


def test_inductor_at_any_length(form):
    """Also where the head dim is not the innermost."""

    def attend(q, k, v, blocks):
        return sparseflash.attention(q, k, v, select.Picks.of(blocks, 64, k.shape[2]))

    torch.compiler.reset()
    compiled = torch.compile(attend, fullgraph=True)
    for n, across in ((320, False), (500, False), (777, False), (500, True)):
        qkv = make_qkv(2, 4, n, n, 64, kv_heads=2, device="cuda")
        qkv = [t.mT.contiguous().mT if across else t for t in qkv]
        qkv = [t.requires_grad_() for t in qkv]
        blocks = torch.arange(4 * n, device="cuda").view(1, 4, n, 1) % 5
        results = [function(*qkv, blocks) for function in (compiled, attend)]
        grads = [torch.autograd.grad(out.square().sum(), qkv) for out in results]
        assert relative_error(*results) < 1e-6
        assert all(relative_error(a, b) < 1e-5 for a, b in zip(*grads, strict=True))


@pytest.mark.parametrize(
    "selector, kv_heads", [(select.nsa(6), 1), (select.moba(128, 4), 4)], ids=str
)
def test_nothing_waits_and_a_graph_follows_q_and_k(selector, kv_heads):
    options = {"kv_heads": kv_heads, "dtype": torch.bfloat16, "device": "cuda"}
    q, k, v = make_qkv(1, 16, 1024, 1024, 64, **options)

    def step():
        inputs = [t.detach().requires_grad_() for t in (q, k, v)]
        with torch.enable_grad():
            out = sparseflash.attention(*inputs, selector.picks(*inputs[:2]))
            return out, *torch.autograd.grad(out.float().sum(), inputs)

    step()
    with NoSync():
        step()
    others = [make_qkv(1, 16, 1024, 1024, 64, kv_heads=kv_heads, seed=seed) for seed in (1, 2)]
    assert_follows(step, (q, k, v), others)
