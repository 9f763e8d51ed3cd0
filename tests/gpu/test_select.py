"""Selectors and packed sequences on a GPU: no waiting, capture in a graph, exact results."""

from collections.abc import Callable

import pytest
import torch

import masks
import sparseflash
from sparseflash import packed, select
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.schedule.blocks import as_tensors
from sparseflash.testing import make_qkv, relative_error
from tests.gpu_calls import GPU, IS_HOPPER, assert_follows, captured, inputs, no_waiting, pairwise
from tests.packing_cases import assert_packings, errors_of_packings, packings
from tests.problems import problem_of, refusal

pytestmark = GPU

CAUSAL = masks.causal()


def selectors() -> dict[str, select.Selector]:
    return {
        "wide": select.top_k(3, block_size=128, within=CAUSAL),
        "mean": select.top_k(4, block_size=64),
        "max": select.top_k(0.2, "max", 64, within=CAUSAL),
        "bound": select.top_k(4, "bound", (128, 64), within=CAUSAL, always=masks.local(0)),
        "mass": select.mass(0.5, block_size=64, within=CAUSAL, max_blocks=8),
        "moba": select.moba(128, 3, 64, capacity=4096),
        "union": select.moba(128, 3, 64, union=True),
        "nsa": select.nsa(4, capacity=4096),
    }


NAMES = list(selectors())


def shared(a: select.Selection, b: select.Selection) -> float:
    """Blocks in both, of those in either: rounding may swap near ties."""
    a_taken, b_taken = a.codes.cpu() != -2, b.codes.cpu() != -2
    return float((a_taken & b_taken).sum() / (a_taken | b_taken).sum())


def skip_where_refused(backend: str, q, k, v, picked: select.Selection) -> None:
    """Skip selections of blocks that the kernels for Hopper cannot cut into their tiles."""
    schedule = schedule_from_selection(picked, q.shape[2], k.shape[2], *q.shape[:2], q.device)
    refused = refusal(backend, problem_of(q, k, v, schedule))
    if refused is not None:
        assert backend == "hopper" and (not IS_HOPPER or "selection" in refused), refused
        assert not IS_HOPPER or picked.block_size != (128, 128), refused
        pytest.skip(refused)


@pytest.mark.parametrize("n", [1024, 1000])
@pytest.mark.parametrize("name", NAMES)
def test_same_as_on_the_cpu(name, n):
    q, k, _ = make_qkv(2, 4, n, n, 64, kv_heads=2)
    selector = selectors()[name]
    expected = selector(q, k)
    found = selector(q.cuda(), k.cuda())
    assert found.codes.is_cuda and found.max_blocks == expected.max_blocks
    assert shared(found, expected) > 0.999


@pairwise(n=[1024, 1000], name=NAMES, backend=["triton", "hopper"])
def test_attention_without_waiting(name, n, backend):
    q, k, v = inputs(n)
    selector, mask = selectors()[name], masks.sliding(100) | masks.local(9)
    skip_where_refused(backend, q, k, v, (selector(q, k) | mask) & CAUSAL)

    def step():
        picked = (selector(q, k) | mask) & CAUSAL
        out = sparseflash.attention(q, k, v, picked, backend=backend)
        assert isinstance(out, torch.Tensor)
        return picked, out, torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    step()  # compiles, and copies the static masks
    torch.cuda.synchronize()
    with no_waiting():
        picked, out, grads = step()
    exact = [t.detach().float().requires_grad_() for t in (q, k, v)]
    expected = sparseflash.attention(*exact, picked.to_block_mask(), backend="reference")
    assert isinstance(expected, torch.Tensor)
    wanted = torch.autograd.grad(expected, exact, torch.ones_like(expected))
    for a, b in zip((out, *grads), (expected, *wanted), strict=True):
        assert relative_error(a, b) < 2e-2


@pytest.mark.parametrize("name", NAMES)
def test_in_a_graph(name):
    """A captured selection follows q and k when they change in place."""
    q, k, v = make_qkv(1, 4, 1000, 1000, 64, kv_heads=2, dtype=torch.float16, device="cuda")
    selector = selectors()[name]

    def step():
        picked = selector(q, k) | masks.local(3)
        schedule = schedule_from_selection(picked, 1000, 1000, 1, 4, "cuda")
        return picked.codes, as_tensors(schedule)[0][0], sparseflash.attention(q, k, v, picked)

    others = [make_qkv(1, 4, 1000, 1000, 64, kv_heads=2, seed=seed) for seed in (1, 2)]
    with torch.no_grad():
        assert_follows(step, (q, k, v), others)


def test_one_million_tokens_of_codes():
    """64-bit addresses: 2 x 8192 x 8192 codes, and lists of them."""
    q = torch.randn(1, 2, 2**20, 16, device="cuda", dtype=torch.bfloat16)
    picked = select.top_k(8, within=CAUSAL)(q, q)
    schedule = schedule_from_selection(picked, 2**20, 2**20, 1, 2, "cuda")
    taken = (picked.codes != -2).sum(-1)
    assert torch.equal(taken.cpu(), torch.arange(1, 8193).clamp(max=8).expand(1, 2, -1))
    assert torch.equal(schedule.rows.ptr[1:].cpu(), taken.flatten().cumsum(0).cpu())
    assert schedule.cols.ptr[-1] == schedule.rows.ptr[-1] == picked.max_blocks


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_dynamo")
def test_random_packings_in_one_graph(monkeypatch):
    """A thousand packings of 8K to 32K tokens: sampled rows agree with float64, gradients too.

    Nothing is compiled after the first one, no graph and no kernel of ours.
    """
    knobs = pytest.importorskip("triton").knobs.runtime
    kernels = []
    monkeypatch.setattr(knobs, "jit_post_compile_hook", lambda **given: kernels.append(given))
    sizes = 32768, 1000, 8192, "cuda", "inductor"
    assert_packings(*errors_of_packings(*sizes, after_first=kernels.clear), limit=1e-2)
    assert not kernels


def packed_masks(offsets: torch.Tensor, n: int) -> dict[str, Callable[[], select.Selection]]:
    """Of every kind of packed masks, what makes one from offsets of at most n / 2 tokens."""
    enter, leave = offsets[:-1], offsets[1:].clone()
    leave[0] = offsets[-1]
    return {
        "documents": lambda: packed.documents(
            offsets, n, causal=True, shared=True, window=200, prefix=3
        ),
        "tree": lambda: packed.prefix_tree(enter, leave, n),
        "streams": lambda: packed.block_diffusion(offsets, n, 32),
        "interleaved": lambda: packed.block_diffusion(offsets, n, 32, interleaved=True),
    }


@pytest.mark.parametrize("name", ["documents", "tree", "streams", "interleaved"])
def test_packings_in_a_cuda_graph(name):
    """A captured mask follows the offsets, without waiting, and has the blocks of the CPU's."""
    n = 1000
    q, k, v = make_qkv(1, 4, n, n, 64, kv_heads=2, dtype=torch.float16, device="cuda")
    first, *others = (offsets // 2 for offsets in packings(n, 5, 12))
    cu_seqlens = first.cuda()

    def step():
        mask = packed_masks(cu_seqlens, n)[name]()
        return mask.codes, mask.bits, sparseflash.attention(q, k, v, mask)

    with torch.no_grad():
        graph, results = captured(step)
        for offsets in others:
            cu_seqlens.copy_(offsets)
            graph.replay()
            torch.cuda.synchronize()
            assert all(torch.equal(*pair) for pair in zip(results, step(), strict=True))
            mask = packed_masks(offsets, n)[name]()
            assert torch.equal(results[0].cpu(), mask.codes)
            assert torch.equal(results[1].cpu(), mask.bits)
            expected = sparseflash.attention(
                q.float(), k.float(), v.float(), mask.to_block_mask(), backend="reference"
            )
            assert isinstance(expected, torch.Tensor)
            assert relative_error(results[2], expected) < 2e-2
        with no_waiting():
            step()


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("name", ["documents", "tree", "streams", "interleaved"])
def test_packings_in_a_compiled_function(name):
    """The compiler makes the same mask, also where it slices the offsets itself."""
    n = 1000

    def step(offsets):
        mask = packed_masks(offsets, n)[name]()
        lists = schedule_from_selection(mask, n, n, 1, 1, "cuda")
        return mask.codes, mask.bits, lists.rows, lists.cols

    compiled = torch.compile(step, fullgraph=True)
    for offsets in packings(n, 3, 12):
        offsets = (offsets // 2).cuda()
        codes, bits, *lists = compiled(offsets)
        same_codes, same_bits, *same_lists = step(offsets)
        assert torch.equal(codes, same_codes)
        assert torch.equal(bits, same_bits)
        for (ptr, mid, *entries), same in zip(lists, same_lists, strict=True):
            assert torch.equal(ptr, same.ptr)
            assert torch.equal(mid, same.mid)
            count = int(ptr[-1])
            assert all(
                torch.equal(a[:count], b[:count]) for a, b in zip(entries, same[2:], strict=True)
            )
