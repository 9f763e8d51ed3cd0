"""Terms of the scores in the portable kernels, in Triton's interpreter: what tiles have in common
and what the edges between their forms are.
"""

from dataclasses import replace
from itertools import product

import pytest
import torch
import triton
import triton.language as tl

import masks
from sparseflash.backends import triton as portable
from sparseflash.kernels.common.shapes import STEPS
from sparseflash.kernels.portable.terms import add_bias, add_slopes, bias_of
from sparseflash.schedule.blocks import schedule_for
from tests import terms_cases
from tests.attention_cases import Case, check
from tests.op_cases import INTERPRETED
from tests.problems import problem_of

pytestmark = INTERPRETED

HALF, FULL = torch.float16, torch.float32
RAGGED = masks.causal(align="bottom_right") | masks.global_tokens(20)
NOTHING = masks.documents([40, 30]) & ~masks.local(0) & masks.causal()  # rows with no key


def test_capped_scores():
    for largest, cap in product(terms_cases.LARGEST, terms_cases.CAPS):
        terms_cases.check(largest, cap, False, "cpu")
    terms_cases.check_what_is_not_finite(False, "cpu")


@triton.jit
def distance_kernel(
    Out, Rest, Bias, First, slope, radius,
    M: tl.constexpr, N: tl.constexpr, T: tl.constexpr, SLOPES: tl.constexpr,
):  # fmt: skip
    """A tile of each program, at the place that First has for it."""
    place = tl.program_id(0)
    first = tl.load(First + place)
    Out += place * M * N
    row, key = tl.arange(0, M), tl.arange(0, N)
    s = tl.zeros([N, M] if T else [M, N], tl.float32)
    if SLOPES:
        s, rest = add_slopes(s, slope, first, M, N, T)
        tl.store(Rest + place * M + row, rest)
    else:
        s, rest = add_bias(s, bias_of(Bias, 0, radius), radius, 1.0, first, M, N, T)
        s += rest
    at = key[:, None] + row[None, :] * N if T else row[:, None] * N + key[None, :]
    tl.store(Out + at, s)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("m, n", [(16, 32), (32, 16)])
def test_every_place_of_a_tile_beside_the_diagonal(m, n, transposed):
    """Slopes of both signs and a bias, where a tile turns from one form to the other."""
    radii = 1, 7, 40
    turns = {-n, 0, m} | {at for r in radii for at in (-n - r, -r, r, m + r)}
    first = torch.tensor(sorted({turn + i for turn in turns for i in (-1, 0, 1)} | {-1000, 4000}))
    distance = first[:, None, None] + torch.arange(n)[None, :] - torch.arange(m)[:, None]
    tile = {"M": m, "N": n, "T": transposed}
    for slope in (0.7, -0.3):
        out, rest = torch.empty(len(first), m, n), torch.empty(len(first), m)
        distance_kernel[(len(first),)](out, rest, None, first, slope, 0, **tile, SLOPES=True)
        wanted = -slope * distance.abs().float()
        torch.testing.assert_close(out + rest[..., None], wanted, rtol=1e-6, atol=1e-5)
    for radius in radii:
        bias, out = torch.randn(2 * radius + 1), torch.empty(len(first), m, n)
        distance_kernel[(len(first),)](out, None, bias, first, 0.0, radius, **tile, SLOPES=False)
        assert torch.equal(out, bias[distance.clamp(-radius, radius) + radius])


CAPS = Case(70, 90, 16, heads=2, kv_heads=1, terms=("softcap",), scale=1.0, block_size=(64, 64))


@pytest.mark.parametrize(
    "softcap, dtype, mask, scale",
    [
        (1e-300, FULL, None, 1.0),
        (50.0, FULL, RAGGED, 1.0),
        (3e38, FULL, RAGGED, 1.0),
        (200.0, FULL, None, 60.0),  # exponentials beyond float32
    ],
)
def test_softcap(softcap, dtype, mask, scale):
    """Scores about 4, up to 20: far beyond the cap, beside the bound of the polynomial, below it;
    float32 without running maxima up to 50; caps that in base 2, or at all, are no float32.
    """
    one = replace(CAPS, softcap=softcap, dtype=dtype, mask=mask, scale=scale)
    check(one, "triton", "cpu", slack=2.0 if scale > 1 else 1.0)


@pytest.mark.parametrize(
    "terms, dtype, more",
    [
        (("softcap", "sink"), HALF, {}),
        (("softcap", "sink", "slopes", "bias"), FULL, {"max_scores": True}),
        (("softcap",), FULL, {"max_scores": True, "mask": NOTHING, "n_k": 70}),
    ],
)
def test_softcap_beside_other_terms(terms, dtype, more):
    """Row maxima are those of the logits, also where the softmax needs none."""
    given = {"softcap": 8.0, "mask": RAGGED} | more
    check(replace(CAPS, dtype=dtype, terms=terms, **given), "triton", "cpu")


def test_slopes_of_both_signs():
    for slope in (2.0, -0.1):
        one = replace(CAPS, terms=("slopes",), slope=slope, mask=RAGGED, scale=None)
        check(one, "triton", "cpu")
    # those of queries that only a tile has are beyond float32
    check(Case(20, 24, 16, terms=("slopes",), slope=-50.0), "triton", "cpu")


FAR = Case(100, 140, 16, heads=2, kv_heads=1, terms=("bias",), block_size=(64, 64))


@pytest.mark.parametrize("radius, n_k, mask", [(1, 100, None), (30, 140, None), (500, 140, RAGGED)])
def test_bias_of_any_radius(radius, n_k, mask):
    """Tiles that take one entry and tiles that are summed by distance, in all shares."""
    check(replace(FAR, radius=radius, n_k=n_k, mask=mask), "triton", "cpu")


@pytest.mark.parametrize(
    "changes",
    [
        {"n_q": 140, "n_k": 100, "batch": 2},
        {"terms": ("sink", "bias"), "dropout_p": 0.3, "mask": RAGGED, "block_size": (64, 32)},
        {"mask": masks.random_blocks(0.3, block=32, seed=1, per_head=True), "block_size": (32, 64)},
    ],
)
def test_bias_beside_other_options(changes):
    check(replace(FAR, radius=20, **changes), "triton", "cpu")


# Their many small tiles take the interpreter up to 15 s each; the tests of a GPU have them.
SLOW = {
    "long lists",
    "blocks that are no powers of two",
    "blocks that are not square",
    "many parts",
    "near tiles on one side",
    "wide tiles of dq, lists",
}


@pytest.mark.parametrize("name", sorted(terms_cases.CASES.keys() - SLOW))
def test_bias_where_the_near_tiles_are(name):
    check(terms_cases.case(name, heads=1), "triton", "cpu")


def test_bias_with_small_tiles_of_dq(monkeypatch):
    """As on a GPU with padded head dims: smaller than those of the gradient of the bias."""
    tiles_for = portable.tiles_for
    padded = lambda *args, **options: tiles_for(*args, **options | {"padded": True})  # noqa: E731
    monkeypatch.setattr(portable, "tiles_for", padded)
    case = terms_cases.case("wide tiles of dq", heads=1, head_dim=72, dtype=HALF, radius=20)
    check(case, "triton", "cpu")


def test_bias_at_the_end_of_a_long_list():
    """Its near tiles come after the first entries that are looked at together."""
    check(terms_cases.case("long lists", heads=1, n_q=16, n_k=1100, radius=20), "triton", "cpu")


def test_bias_with_all_other_options():
    terms = ("sink", "softcap", "slopes", "bias")
    options = {"terms": terms, "dropout_p": 0.3, "batch": 2, "heads": 2, "kv_heads": 1}
    case = terms_cases.case("near partial, far full", n_q=100, n_k=192, **options)
    check(case, "triton", "cpu")


LENGTHS = (1, 1), (100, 100), (64, 900), (900, 64), (777, 1)


def test_diagonals_of_near_tiles():
    """They are those that have such a tile, and hardly more."""
    for given in product((1, 7, 128, 2000), ((16, 256), (64, 16), (256, 256)), LENGTHS):
        radius, (head_dim, block), (n_q, n_k) = given
        check_diagonals(radius, head_dim, block, n_q, n_k)


def check_diagonals(radius, head_dim, block, n_q, n_k):
    qkv = [torch.empty(1, 1, n, head_dim, dtype=HALF) for n in (n_q, n_k, n_k)]
    blocks = masks.causal().build(n_q, n_k, (block, block))
    schedule = schedule_for(blocks, n_q, n_k, 1, 1, "cpu")
    backward = portable.plan_backward(problem_of(*qkv, blocks), schedule)
    first, diagonals, n_parts = backward.near(radius)
    size, (m, n) = backward.near_block, backward.q.tiles[:2]
    queries, keys = torch.arange(0, n_q, size)[:, None], torch.arange(0, n_k, size)[None, :]
    far_first = keys // n * n - queries // m * m - (n_k - n_q)
    near = (far_first > -radius - n) & (far_first < radius + m)
    ahead = (keys - queries)[near] // size
    assert first <= ahead.min() and ahead.max() < first + diagonals
    assert diagonals < ahead.max() - ahead.min() + 1 + (m + n) // size
    assert size * STEPS * n_parts >= n_q > size * STEPS * (n_parts - 1)
