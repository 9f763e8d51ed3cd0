"""The Triton kernels in Triton's interpreter: float32 and float16 against the float64 oracle."""

import random
from dataclasses import replace
from typing import Any

import pytest
import torch

import masks
import sparseflash
from sparseflash import select
from sparseflash.backends import layouts
from sparseflash.backends import triton as backend
from sparseflash.kernels.portable import tma
from sparseflash.schedule.blocks import schedule_for
from sparseflash.testing import make_qkv, relative_error
from tests import nan_cases
from tests.attention_cases import HEAD_DIMS, INTERPRETER_LENGTHS, Case, check, random_case
from tests.op_cases import INTERPRETED, plans
from tests.problems import problem_of

pytestmark = INTERPRETED


DTYPES = (torch.float32, torch.float16)


# Of the first 400: quick ones that together have every value, and 820 pairs of values.
SEEDS = (4, 22, 39, 55, 58, 73, 104, 175, 252, 254, 273, 277, 303, 314, 318, 349, 354, 380)


@pytest.mark.parametrize("seed", SEEDS)
def test_random_problem(seed):
    check(random_case(seed, INTERPRETER_LENGTHS, HEAD_DIMS, DTYPES), "triton", "cpu")


BOTH_KINDS = masks.local(150) | masks.global_tokens(40)  # partial and full blocks in one row
EMPTY = masks.causal() & ~masks.causal()


@pytest.mark.parametrize(
    "length, mask, dtype",
    [
        (1, None, torch.float16),
        *((n, None, torch.float32) for n in (1, 128, 193)),
        (330, BOTH_KINDS, torch.float32),
        (40, EMPTY, torch.float32),
    ],
)
def test_masks(length, mask, dtype):
    check(Case(length, length, 64, dtype, mask=mask), "triton", "cpu")


def test_heads_side_by_side():
    """In a matrix that a descriptor sees, the tile of a head begins at a column of its own."""
    case = Case(130, 140, 16, heads=4, v_head_dim=32, batch=2, token_major=True)
    check(case, "triton", "cpu")


# The interpreter pads no head dim: 72 has the tiles of 128.
@pytest.mark.parametrize(
    "family, head_dim",
    [
        ("ampere", 256),
        ("blackwell", 72),
        ("blackwell", 256),
        ("geforce", 32),
        ("geforce", 72),
        ("cdna", 32),
        ("cdna", 128),
    ],
)
def test_tiles_of_other_gpus(family, head_dim, monkeypatch):
    monkeypatch.setattr(backend, "family_of", lambda device: family)
    monkeypatch.setattr(tma, "has_tma", lambda device: family not in ("ampere", "cdna"))
    n, block = (150, 128) if family == "blackwell" else (90, 64)  # the others' tiles are smaller
    mask = masks.local(block + 5)  # the first row has a full block and a partial one
    case = Case(n, n, head_dim, mask=mask, block_size=(block, block), dropout_p=0.1)
    check(case, "triton", "cpu")


def test_token_strides_that_offsets_inside_a_tile_cannot_hold_are_refused():
    problem = problem_of(*make_qkv(1, 1, 16, 16, 16))
    for apart, refused in ((2**23 - 1, False), (2**23, True)):
        changed = problem._replace(v_strides=(16 * apart, 16 * apart, apart, 1))
        reason = backend.unsupported(changed, "forward")
        assert ("token strides below 2**23" in str(reason)) == refused


# ------------------------------------------------------------------ few queries, many keys
BOTTOM = masks.causal(align="bottom_right")
GAPS = masks.random_blocks(0.6, block=16, per_head=True)
GROUPED: dict[str, Any] = {"heads": 4, "kv_heads": 2, "max_scores": True}
FEW = {
    "one query": Case(1, 5000, 16, sink=True, **GROUPED),
    "one query of many heads": Case(1, 1030, 16, batch=3, heads=12, kv_heads=12),
    "causal": Case(3, 1500, 16, mask=BOTTOM, heads=4, kv_heads=1, sink=True, sink_mean=9.0),
    "causal, float16": Case(16, 1100, 16, torch.float16, mask=BOTTOM, **GROUPED),
    "window": Case(16, 2500, 24, mask=masks.local(1200, align="bottom_right"), **GROUPED),
    "blocks of each head": Case(16, 3000, 16, mask=GAPS, block_size=(16, 32), **GROUPED),
    "cap": Case(3, 1300, 16, mask=BOTTOM, softcap=1.5, sink=True, v_head_dim=40, **GROUPED),
    "tokens first": Case(16, 1024, 16, batch=2, token_major=True, scale=0.3, **GROUPED),
}


@pytest.fixture
def only_few(monkeypatch):
    """Any other forward fails."""
    monkeypatch.setattr(backend, "plan_forward", None)


@pytest.mark.parametrize("name", FEW)
def test_few_queries_of_many_keys(name, only_few):
    check(FEW[name], "triton", "cpu")


@pytest.mark.parametrize("value", [float("nan"), -1e30])
def test_few_queries_some_without_a_key_beside_nan(value, only_few):
    seen = torch.rand(2, 4, 3, 1300, generator=torch.Generator().manual_seed(1)) < 0.9
    seen[:, :2, 1] = False
    case = Case(3, 1300, 16, batch=2, mask=masks.mask_from(seen.numpy()), sink=True, **GROUPED)
    for seed, sink in enumerate((True, False)):
        nan_cases.check(replace(case, seed=seed, sink=sink), "triton", value=value)


def position(s, b, h, q, k, n_q, n_k, row, far):
    return s * row[b, q] - far[h] * abs(k - q + n_q - n_k) / n_k


def test_few_queries_of_selections_with_a_score_and_lengths(only_few):
    """Against the reference in float64. One plan serves all selections, and keeps none."""
    tables = torch.randn(2, 3), torch.rand(4)
    for seed in range(2):
        q, k, v = make_qkv(2, 4, 3, 1500, 16, kv_heads=2, seed=seed)
        picked = select.top_k(70, block_size=16)(q, k.repeat_interleave(2, 1))
        for mask, lengths, scored in ((picked, None, True), (BOTTOM, [1500, 1100], False)):
            found = []
            for dtype, name in ((torch.float32, "triton"), (torch.float64, "reference")):
                given = [t.to(dtype).requires_grad_() for t in (q, k, v, *tables)]
                score = sparseflash.score(position)(row=given[3], far=given[4]) if scored else None
                options: dict[str, Any] = {"lengths": lengths, "score": score, "backend": name}
                out = sparseflash.attention(given[0], given[1], given[2], mask, **options)
                leaves = given if scored else given[:3]
                found.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
            for a, b in zip(*found, strict=True):
                assert relative_error(a, b) < 1e-5


# ---------------------------------------------------------------- copies of single keys
def lines(rng: random.Random, n: int) -> masks.Mask:
    """Columns, most of them the only one in their block, with diagonals or without."""
    columns = tuple(rng.sample(range(n), 6))
    near = tuple(range(rng.randrange(1, 12)))
    slashes = masks.vertical_slash(columns, near, align="bottom_right")
    return rng.choice([slashes, masks.keys_at(columns), masks.keys_at(columns) & masks.causal()])


@pytest.mark.parametrize("seed", [4, 5, 7, 9, 12, 13, 15, 17])  # they have enough to copy
def test_copies_of_single_keys(seed, monkeypatch):
    monkeypatch.setattr(layouts, "PAIRS_PER_COPY", 0)
    rng = random.Random(seed)
    n, kv_heads = rng.randrange(200, 300), rng.choice([1, 2])
    heads = kv_heads * rng.choice([1, 2])
    mask = lines(rng, n)
    if seed % 2:  # columns of each head
        mask = masks.heads(*(lines(rng, n) for _ in range(heads)))
    case = Case(
        rng.randrange(170, n), n, 16, mask=mask, block_size=(16, rng.choice([16, 32, 48])),
        heads=heads, kv_heads=kv_heads, batch=rng.choice([1, 2]), token_major=seed % 3 == 0,
        v_head_dim=32, seed=seed, sink=seed % 4 == 0, max_scores=True,
    )  # fmt: skip
    check(case, "triton", "cpu")
    assert all(isinstance(plan.run_forward, layouts.CopiesForward) for plan in plans())


def test_copies_spread_no_nan(monkeypatch):
    monkeypatch.setattr(layouts, "PAIRS_PER_COPY", 0)
    mask = masks.keys_at((40, 90, 130)).build(200, 200, 16)
    q, k, v = make_qkv(1, 1, 200, 200, 16, requires_grad=True)
    with torch.no_grad():  # of no query
        k[:, :, [0, 199]] = v[:, :, [0, 199]] = torch.nan
    out = sparseflash.attention(q, k, v, mask, backend="triton")
    gradients = torch.autograd.grad(out.sum(), (q, k, v))
    assert isinstance(plans()[0].run_forward, layouts.CopiesForward)
    assert all(t.isfinite().all() for t in (out, *gradients))


def test_copies_where_they_save_time():
    """Verticals at a few hundred places need copies; other masks, and short sequences, do not."""
    columns, n = tuple(range(50, 8192, 37)), 8192
    lone, near = masks.vertical_slash(columns, tuple(range(512))), masks.local(256)
    q, k, v = (torch.empty(1, 8, n, 64, device="meta") for _ in range(3))

    def entries(mask: masks.Mask, dropout_p: float = 0.0) -> tuple[int, int | None]:
        problem = problem_of(q, k, v, mask, dropout_p=dropout_p)
        schedule = schedule_for(mask, n, n, 1, 8, "cpu")
        copies = layouts.copies_for(problem._replace(device=torch.device("cpu")), schedule)
        return len(schedule.rows.idx), copies and len(copies.schedule.rows.idx)

    before, after = entries(lone)
    assert after is not None and before > 4 * after
    for mask in (near, masks.causal(), masks.keys_at((9,)) | near):
        assert entries(mask)[1] is None
    assert entries(lone, 0.1)[1] is None
