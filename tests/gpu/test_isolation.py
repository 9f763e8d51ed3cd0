"""NaN and inf in tokens that nobody may see: other heads, other batches, empty blocks, the memory
around the inputs. None of it may reach a result. NaN in what a query may see reaches its results.
"""

from dataclasses import replace

import pytest
import torch

import masks
import sparseflash
from sparseflash.picks import kernels as picked
from sparseflash.testing import make_qkv, relative_error
from tests import nan_cases
from tests.attention_cases import DTYPES, GPU_LENGTHS, LOW
from tests.gpu_calls import GPU, assert_equal, pairwise

pytestmark = GPU

BLOCKS = [(128, 128), (64, 64), (32, 16), (96, 48)]
POISON = [float("nan"), float("inf"), float("-inf")]


def run(qkv, mask, **options):
    """out, lse, dq, dk, dv; the cotangent is the same whatever the inputs are."""
    qkv = [t.detach().requires_grad_() for t in qkv]
    out, lse = sparseflash.attention(*qkv, mask, return_lse=True, **options)
    generator = torch.Generator("cuda").manual_seed(1)
    dout = torch.randn(out.shape, generator=generator, device="cuda").to(out.dtype)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, qkv, dout)


def problem(n=1000, **options):
    options = {"kv_heads": 2, "dtype": torch.bfloat16, "device": "cuda"} | options
    return make_qkv(2, 4, n, n, 64, **options)


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize("block", BLOCKS)
def test_other_heads_and_batches_do_not_leak(block, poison, backend):
    mask = (masks.local(100) | masks.global_tokens(20)).build(1000, block_size=block)
    qkv = problem()
    clean = run(qkv, mask, backend=backend, deterministic=True)
    q, k, v = (t.clone() for t in qkv)
    q[1, 2:], k[1, 1], v[1, 1] = poison, poison, poison  # the second key head and its queries
    found = run((q, k, v), mask, backend=backend, deterministic=True)
    assert_equal([t[0] for t in found], [t[0] for t in clean])
    # the first key head and its queries
    assert_equal(*([t[1, : t.shape[1] // 2] for t in results] for results in (found, clean)))


@pytest.mark.parametrize("block", [(16, 128), (32, 16), (128, 128)])
def test_keys_do_not_leak_into_the_sums_of_another_head(block, backend):
    """Gradients of queries by atomics: not the same bits, but no NaN of another head among them."""
    mask = masks.local(500).build(1000, block_size=block)
    q, k, v = problem()
    clean = run((q, k, v), mask, backend=backend)
    k = k.clone()
    k[:, 0] = float("nan")  # of the first query heads of each batch entry
    found = run((q, k, v), mask, backend=backend)
    for name, a, e in zip(("out", "lse", "dq"), found, clean, strict=False):
        assert relative_error(a[:, 2:], e[:, 2:]) < 1e-3, name


@pairwise(queries=[slice(768, 1152), slice(0, 384)], block=BLOCKS, poison=POISON)
def test_blocks_that_nobody_sees_do_not_leak(queries, block, poison, backend):
    """Keys without a query and queries without a key, whole tiles of 128 of them: in a tile that
    has others too, 0 * NaN is NaN.
    """
    n = 1300
    keys = slice(384, 768)  # as the queries, of whole blocks of every size here
    allowed = torch.from_numpy(masks.local(150).build(n).to_dense()[0, 0]).clone()
    allowed[queries], allowed[:, keys] = False, False
    mask = masks.mask_from(allowed.numpy()).build(n, block_size=block)
    qkv = problem(n)
    clean = run(qkv, mask, backend=backend, deterministic=True)
    q, k, v = (t.clone() for t in qkv)
    q[:, :, queries], k[:, :, keys], v[:, :, keys] = poison, poison, poison
    found = run((q, k, v), mask, backend=backend, deterministic=True)
    assert_equal(found, clean)
    out, lse, dq, dk, dv = found
    assert (out[:, :, queries] == 0).all() and (lse[:, :, queries] == float("-inf")).all()
    assert (dq[:, :, queries] == 0).all()
    assert (dk[:, :, keys] == 0).all() and (dv[:, :, keys] == 0).all()


def test_results_do_not_write_around_themselves(backend):
    """Gradients of the middle of larger tensors leave the rest of those at zero."""
    whole = [
        t.requires_grad_() for t in make_qkv(2, 3, 700, 700, 64, dtype=torch.float16, device="cuda")
    ]
    middle = [t[:, 1:2, 101:602] for t in whole]
    out = sparseflash.attention(*middle, masks.local(60), backend=backend)
    for t in torch.autograd.grad(out, whole, torch.ones_like(out)):
        assert t.isfinite().all() and t[:, 1:2, 101:602].abs().sum() > 0
        t[:, 1:2, 101:602] = 0
        assert (t == 0).all()


# ---- random calls amid NaN, and with NaN in what queries may see


@pytest.mark.parametrize("seed", range(20))
def test_attention_reads_nothing_around_its_inputs(seed, backend):
    dtypes = LOW if backend == "hopper" else DTYPES
    nan_cases.attention(seed, backend, "cuda", dtypes)
    for deterministic in (False, True):  # float16 has the rounding that the tolerance is for
        options = {"extents": GPU_LENGTHS, "deterministic": deterministic}
        nan_cases.attention(100 + seed, backend, "cuda", (torch.float16,), **options)


@pytest.mark.parametrize("gathers", [True, False], ids=["gathered", "joined"])
@pytest.mark.parametrize("seed", range(20))
def test_picks_read_nothing_around_their_inputs(seed, gathers, monkeypatch):
    monkeypatch.setattr(picked, "_gathers", lambda *given: gathers)
    nan_cases.picks(seed, "cuda", DTYPES)


@pytest.mark.parametrize("seed", range(20))
def test_decoding_reads_nothing_around_its_inputs(seed):
    nan_cases.decode(seed, "cuda", DTYPES[seed % 3])


@pytest.mark.parametrize("seed", range(30))
def test_nan_shows_in_all_that_may_see_it(seed, backend):
    dtypes = LOW if backend == "hopper" else DTYPES
    case = nan_cases.random_nan_case(seed, GPU_LENGTHS, dtypes, (40, 64, 96, 128, 256))
    if backend == "hopper":
        case = replace(case, softcap=0.0)
    nan_cases.check(case, backend, "cuda")


@pytest.mark.parametrize("seed", range(15))
def test_nan_in_decoding(seed):
    dtype = DTYPES[seed % 3]
    nan_cases.check_decode(seed, "triton", "cuda", dtype=dtype)


@pytest.mark.parametrize("n", [300, 1024, 2048])
def test_nan_beside_padding(n, backend):
    """Below 1024 tokens padding is hidden, from there on it is skipped."""
    qkv = make_qkv(2, 2, n, n, 64, dtype=torch.bfloat16, device="cuda")
    qkv[0][0, 0, 7, 3] = torch.nan
    out, lse, maxima = sparseflash.attention(
        *qkv, lengths=[n - 40, n // 2], return_lse=True, return_max_scores=True, backend=backend
    )
    bad = torch.zeros(2, 2, n, dtype=torch.bool, device="cuda")
    bad[0, 0, 7] = True
    assert torch.equal(out.isnan().all(-1), bad) and torch.equal(out.isnan().any(-1), bad)
    assert torch.equal(lse.isnan(), bad) and torch.equal(maxima.isnan(), bad)
