"""The backends of a GPU, in every dtype they take, against the float64 oracle."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import masks
from sparseflash.schedule import locality
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.schedule.tile_spec import TileSpec
from tests.attention_cases import (
    DTYPES,
    GPU_LENGTHS,
    HEAD_DIMS,
    LOW,
    Case,
    check,
    random_case,
    schedule_of,
)
from tests.gpu.random_calls import Runner
from tests.gpu_calls import GPU, IS_HOPPER, pairwise

pytestmark = GPU

WIDE = (*HEAD_DIMS, 96, 192, 256)
STRUCTURED = masks.local(150) | masks.butterfly(128) | masks.global_tokens(40)
GLOBAL = masks.local(100) | masks.global_tokens(64)
LAST = masks.causal(align="bottom_right")
PER_HEAD = masks.random_blocks(0.3, block=64, per_head=True)
HOLE = masks.documents([400, 400, 200]) & ~masks.local(0) & ~masks.global_tokens(300)
HALF = masks.mask_from(np.random.default_rng(0).random((100, 65500)) < 0.5)


def check_case(backend, *shape, slack=1.0, **options):
    check(Case(*shape, **options), backend, "cuda", slack)


@pytest.mark.parametrize("seed", range(60))
def test_random_problem(seed, backend):
    """For Hopper, problems that its kernels take: 16-bit, tokens of a multiple of 16 bytes."""
    if backend == "hopper":
        case = random_case(seed, GPU_LENGTHS, tuple(d for d in WIDE if d % 8 == 0), LOW)
    else:
        case = random_case(seed, GPU_LENGTHS, WIDE, DTYPES)
    check(case, backend, "cuda")


@pairwise(length=[1, 100, 128, 1000, 4097], head_dim=[4, 32, 64, 80, 128, 256], dtype=DTYPES)
def test_dense(length, head_dim, dtype, backend):
    check_case(backend, length, length, head_dim, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_and_dropout(dtype, backend):
    options = {"mask": PER_HEAD, "dropout_p": 0.2, "token_major": True}
    check_case(backend, 1000, 700, 64, dtype, batch=2, heads=6, kv_heads=2, **options)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(
    "length",
    [*range(1, 10), 15, 16, 17, 31, 33, 63, 64, 65, 127, 128, 129, 191, 255, 257, 1023, 2049, 4095],
)
def test_every_kind_of_length(length, deterministic, backend):
    mask = masks.local(70) | masks.strided(64) | masks.global_tokens(3)
    slack = 3 if length < 100 else 1
    for n_q, n_k in ((length, length), (length, 130), (130, length)):
        options = {"mask": mask, "deterministic": deterministic, "slack": slack}
        check_case(backend, n_q, n_k, 64, torch.bfloat16, **options)


@pairwise(
    block_q=[16, 32, 48, 64, 96, 128, 256],
    block_k=[16, 32, 48, 64, 96, 128, 256],
    deterministic=[False, True],
)
def test_every_pair_of_block_sizes(block_q, block_k, deterministic, backend):
    """Random blocks of the size itself: full, partial and empty ones, and rows without any."""
    mask = masks.random_blocks(0.3, block=16, seed=block_q + block_k) | masks.local(20)
    mask = mask & ~masks.documents([500, 90, 300]) | masks.butterfly(32)
    options = {"block_size": (block_q, block_k), "seed": block_q * block_k, "mask": mask}
    check_case(backend, 890, 890, 64, torch.float16, deterministic=deterministic, **options)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize(
    "head_dim, v_head_dim",
    [(64, 128), (128, 64), (192, 128), (96, 64), (32, 64), (64, 32), (40, 72), (64, 256)],
)
def test_values_of_another_head_dim(head_dim, v_head_dim, dtype, backend):
    for mask, block in ((STRUCTURED, (128, 128)), (STRUCTURED, (64, 32)), (None, (128, 128))):
        options = {"mask": mask, "block_size": block, "token_major": mask is None}
        check_case(backend, 700, 1000, head_dim, dtype, heads=4, v_head_dim=v_head_dim, **options)


@pytest.mark.parametrize("sink", [False, True])
@pytest.mark.parametrize("n_q, n_k, mask", [(1, 5000, None), (3, 4097, LAST), (16, 5000, PER_HEAD)])
def test_few_queries_of_many_keys(n_q, n_k, mask, sink, backend):
    options = {"heads": 8, "kv_heads": 2, "mask": mask, "sink": sink, "max_scores": sink}
    check_case(backend, n_q, n_k, 128, torch.bfloat16, batch=2, **options)


GROUPED = {"heads": 4, "kv_heads": 2}
ABOVE_128 = {
    "192": Case(2048, 2048, 192),
    "256, ragged": Case(300, 333, 256, lse_gradient=False),
    "256, causal": Case(1000, 1000, 256, batch=2, mask=masks.causal()),
    "192, causal, grouped": Case(777, 777, 192, mask=masks.causal(), **GROUPED),
    "192 and 128, causal": Case(700, 1000, 192, mask=masks.causal(), v_head_dim=128),
    "256, blocks of 64": Case(890, 890, 256, mask=STRUCTURED, block_size=(64, 64)),
    "256, blocks of 16": Case(890, 1001, 256, mask=STRUCTURED, block_size=(16, 16), **GROUPED),
    "192, blocks of 32 x 256": Case(890, 890, 192, mask=STRUCTURED, block_size=(32, 256)),
    "168, token-major": Case(1000, 999, 168, mask=STRUCTURED, token_major=True, scale=0.1),
    "256, dropout": Case(700, 1000, 256, dropout_p=0.2, token_major=True),
    "192, dropout, grouped": Case(1000, 700, 192, mask=PER_HEAD, dropout_p=0.2, **GROUPED),
    "256, parts": Case(8192, 8192, 256, heads=1, kv_heads=1, mask=GLOBAL),
    "256, empty rows": Case(1000, 1000, 256, mask=HOLE),
    "256, short rows": Case(2000, 2000, 256, mask=masks.local(60)),
}


@pytest.mark.parametrize("dropout_p", [0.0, 0.2])
@pytest.mark.parametrize("head_dim, v_head_dim", [(256, 256), (192, 192), (192, 128), (128, 256)])
def test_parts_and_whole_rows_above_head_dim_128(head_dim, v_head_dim, dropout_p, backend):
    """A program runs two or three tiles one after the other, parts and whole ones."""
    n_q, n_k, heads, kv_heads = 2000, 8111, 12, 4
    case = Case(
        n_q, n_k, head_dim, torch.bfloat16, heads=heads, kv_heads=kv_heads, mask=GLOBAL,
        v_head_dim=v_head_dim, dropout_p=dropout_p,
    )  # fmt: skip
    spec = TileSpec(True, 128, 64, n_q, n_k, 1, heads, kv_heads, sms=132)
    lists = tile_lists(schedule_of(case), spec, "cuda")
    assert lists.n_parts > 0  # the case is about them
    assert heads * lists.n_items > 2 * spec.sms
    check(case, backend, "cuda")


DIMS_UP_TO_96 = [(72, 72), (80, 80), (96, 96), (96, 72), (72, 32), (80, 64), (88, 128), (32, 96)]
DIMS_UP_TO_96 += [(128, 72)]


@pairwise(**{"head_dim, v_head_dim": DIMS_UP_TO_96}, dtype=LOW, deterministic=[False, True])
def test_head_dims_up_to_96(head_dim, v_head_dim, dtype, deterministic, backend):
    """Hopper multiplies 96 columns of them, in two products, and of others the padded ones."""
    for mask, block in ((None, (128, 128)), (STRUCTURED, (128, 128)), (STRUCTURED, (64, 32))):
        options = {"mask": mask, "block_size": block, "deterministic": deterministic}
        check_case(backend, 700, 1000, head_dim, dtype, v_head_dim=v_head_dim, **options)


SCATTERED = masks.random_blocks(0.5, block=64, per_head=True)
ONE = {"heads": 1, "kv_heads": 1}
BLOCKS_64 = {"mask": SCATTERED, "block_size": (64, 64)}
UP_TO_96 = {
    "causal, maxima": Case(2048, 2048, 96, batch=2, mask=masks.causal(), max_scores=True),
    "token-major, grouped": Case(777, 1001, 80, mask=STRUCTURED, token_major=True, **GROUPED),
    "dropout, grouped": Case(1000, 700, 72, mask=PER_HEAD, dropout_p=0.2, **GROUPED),
    "dropout, two passes": Case(700, 700, 88, mask=PER_HEAD, dropout_p=0.2, deterministic=True),
    "sink, empty rows": Case(1000, 1000, 96, mask=HOLE, sink=True),
    "parts": Case(8192, 8111, 96, mask=GLOBAL, **ONE),
    "parts, sink": Case(8192, 8192, 80, mask=GLOBAL, sink=True, max_scores=True, **ONE),
    "parts, two passes": Case(8192, 8192, 72, mask=GLOBAL, deterministic=True, **ONE),
    "parts, v of 80": Case(8192, 8192, 128, v_head_dim=80, mask=GLOBAL, **ONE),
    "parts, 192 and 96": Case(8192, 8192, 192, v_head_dim=96, mask=GLOBAL, **ONE),
    "scattered, grouped": Case(2048, 1500, 80, heads=4, kv_heads=1, **BLOCKS_64),
    "scattered, v of 96": Case(2048, 2048, 64, v_head_dim=96, **BLOCKS_64),
    "scattered, v of 128": Case(2048, 2048, 96, v_head_dim=128, **BLOCKS_64),
    "blocks of 16": Case(890, 1001, 96, mask=STRUCTURED, block_size=(16, 16)),
}  # fmt: skip


OTHER_DIMS = ABOVE_128 | UP_TO_96


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", OTHER_DIMS)
def test_kinds_of_calls_at_head_dims_up_to_96_and_above_128(name, dtype, backend):
    check(replace(OTHER_DIMS[name], dtype=dtype), backend, "cuda")


OF_64 = {
    "full": Case(2048, 2048, 128, mask=SCATTERED),
    "partial": Case(3000, 2990, 128, mask=SCATTERED & masks.causal(), heads=4),
    "grouped": Case(2048, 1500, 128, batch=2, heads=4, kv_heads=1, mask=SCATTERED),
    "token-major, padded": Case(2000, 2048, 96, mask=SCATTERED, token_major=True),
    "narrower v": Case(2048, 2048, 128, v_head_dim=64, mask=SCATTERED),
    "wider v": Case(2048, 2048, 64, v_head_dim=128, mask=SCATTERED),
    "empty rows": Case(3000, 3000, 128, mask=SCATTERED & ~masks.documents([2500, 500])),
    "parts": Case(8192, 8192, 128, heads=1, kv_heads=1, mask=(masks.random_blocks(0.15, block=64)
                  | masks.global_tokens(64))),
}  # fmt: skip


@pairwise(name=OF_64, block=[(64, 64), (32, 64), (16, 32), (128, 64)], dtype=LOW)
def test_scattered_key_blocks_of_64(name, block, dtype, backend):
    """At head dims from 65 to 128 they have tiles of their own in the backward."""
    check(replace(OF_64[name], dtype=dtype, block_size=block), backend, "cuda")


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", OF_64)
def test_scattered_key_blocks_have_the_same_gradients_again(name):
    """dK and dV are sums in one order: a race would change their bits."""
    case = replace(OF_64[name], dtype=torch.bfloat16, block_size=(64, 64))
    runner = Runner(case, "hopper")
    results = [runner.launch(deterministic=False) for _ in range(5)]
    for again in results[1:]:
        for i in (-2, -1):
            assert torch.equal(again[i], results[0][i])


GROUPS = {"batch": 2, "heads": 8, "kv_heads": 1, "dtype": torch.bfloat16}
RANDOM = masks.random_blocks(0.3, block=64)
BANDED = {
    "head dim 64": Case(1900, 1700, 64, mask=RANDOM, block_size=(128, 128), **GROUPS),
    "head dim 128": Case(1900, 1700, 128, mask=RANDOM, block_size=(128, 128), **GROUPS),
    "blocks of 64": Case(1900, 1700, 128, mask=RANDOM, block_size=(64, 64), **GROUPS),
    "blocks of 64, head dim 64": Case(1900, 1700, 64, mask=RANDOM, block_size=(64, 64), **GROUPS),
    "head dim 256": Case(1900, 1700, 256, mask=RANDOM, block_size=(64, 64), **GROUPS),
    "masks of their own": Case(1900, 1700, 128, mask=masks.random_blocks(0.3, block=64,
                               per_head=True), block_size=(64, 64), **GROUPS | {"kv_heads": 2}),
    "partial, dropout": Case(1900, 1700, 128, mask=RANDOM & masks.random_blocks(0.8, block=16),
                             dropout_p=0.3, block_size=(64, 64), **GROUPS),
}  # fmt: skip


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", BANDED)
def test_columns_that_are_cut_into_bands(name, monkeypatch):
    """Lists so short are not, unless the limits say so."""
    for limit, value in (("_APART", 1.0), ("_WORTH", 1), ("_UNEVEN", 1.0)):
        monkeypatch.setattr(locality, limit, value)
    case = BANDED[name]
    extents = case.n_q, case.n_k, case.batch, case.heads, case.kv_heads
    spec = TileSpec(False, case.block_size[1], 64, *extents, 132, 1024)
    lists = tile_lists(schedule_of(case), spec, "cuda")
    assert lists.n_parts > lists.n_items // 2  # the case is about them
    check(case, "hopper", "cuda")
    runner = Runner(case, "hopper")
    first, second = (runner.launch(deterministic=False) for _ in range(2))
    assert torch.equal(first[-2], second[-2]) and torch.equal(first[-1], second[-1])


LONG_ROWS = {
    # name: mask, n_q, n_k, which sides have parts
    "global tokens": (GLOBAL, 8192, 8192, "rows cols"),
    "global tokens, ragged": (GLOBAL, 8100, 8111, "rows cols"),
    "few queries": (masks.dense(), 128, 65536, "rows"),
    "one query": (masks.local(3), 1, 16384, ""),
    "few keys": (masks.dense(), 65536, 128, "cols"),
    "few partial queries": (HALF, 100, 65500, "rows"),
}


@pairwise(name=LONG_ROWS, head_dim=[64, 128], deterministic=[False, True], dropout_p=[0.0, 0.2])
def test_rows_and_columns_in_parts(name, head_dim, deterministic, dropout_p, backend):
    mask, n_q, n_k, sides = LONG_ROWS[name]
    heads = 1 if sides else 64  # the error of a single row is no statistic
    case = Case(
        n_q, n_k, head_dim, torch.bfloat16, heads=heads, kv_heads=heads, mask=mask,
        deterministic=deterministic, dropout_p=dropout_p,
    )  # fmt: skip
    for by in sides.split():
        spec = TileSpec(by == "rows", 128, 128, n_q, n_k, 1, 1, 1, sms=132)
        lists = tile_lists(schedule_of(case), spec, "cuda")
        assert lists.n_parts > 0, by  # the case is about them
    check(case, backend, "cuda")


@pairwise(
    block=[(128, 128), (64, 64), (64, 16), (16, 64)],
    kv_heads=[1, 2, 4, 8],
    deterministic=[False, True],
)
def test_masks_of_their_own_in_grouped_heads(block, kv_heads, deterministic, backend):
    mask = masks.random_blocks(0.3, block=32, per_head=True)
    for n_k in (1000, 333):
        options = {"mask": mask, "block_size": block, "deterministic": deterministic}
        heads = {"batch": 2, "heads": 8, "kv_heads": kv_heads}
        check_case(backend, 1000, n_k, 64, torch.bfloat16, **heads, **options)


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("head_dim", [32, 128])
def test_rows_and_columns_with_nothing(head_dim, token_major, backend):
    """Whole tiles of queries that attend to nothing, of keys that nobody attends to, and a mask
    that is empty for one head, or for all.
    """
    none = masks.causal() & ~masks.causal()
    for mask in (HOLE, none, masks.heads(HOLE, none)):
        for block in ((128, 128), (64, 64), (16, 32)):
            options = {"mask": mask, "block_size": block, "token_major": token_major}
            check_case(backend, 1000, 1000, head_dim, torch.float16, **options)
