"""Forward tiles that two heads of a group share, where the blocks of a mask fill half of one."""

from dataclasses import replace

import pytest
import torch

import masks
from sparseflash.backends.hopper import forward
from sparseflash.backends.hopper.forward import forward_spec, forward_tiles_for
from sparseflash.schedule.tile_lists import tile_lists
from tests.attention_cases import LOW, Case, check, draw, schedule_of
from tests.gpu.random_calls import Runner
from tests.gpu_calls import HOPPER, pairwise
from tests.problems import problem_of

pytestmark = HOPPER

GLOBAL = masks.local(100) | masks.global_tokens(64)
HOLE = masks.documents([500, 400, 200]) & ~masks.local(0) & ~masks.global_tokens(300)
PAIR = {"batch": 2, "heads": 8, "kv_heads": 2, "dtype": torch.bfloat16, "block_size": (64, 64)}
SMALL = masks.random_blocks(0.3, block=64) | masks.local(20)
SHARED = {
    "groups of two": Case(2100, 2100, 128, mask=SMALL, **PAIR | {"kv_heads": 4}),
    "few heads": Case(2200, 1500, 64, mask=SMALL, **PAIR | {"heads": 4}),
    "one group": Case(1100, 1100, 128, mask=SMALL & masks.causal(), **PAIR | {"kv_heads": 1}),
    "batch": Case(600, 777, 128, mask=SMALL, **PAIR | {"batch": 5}),
    "token-major, padded": Case(1100, 1030, 96, mask=SMALL, token_major=True, **PAIR),
    "narrower v": Case(1100, 1100, 128, v_head_dim=64, mask=SMALL, **PAIR),
    "wider v": Case(1100, 1100, 64, v_head_dim=128, mask=SMALL, **PAIR),
    "much wider v": Case(1100, 1100, 64, v_head_dim=256, mask=SMALL, **PAIR),
    "head dim 192, v of 128": Case(1100, 1100, 192, v_head_dim=128, mask=SMALL, **PAIR),
    "sinks": Case(1100, 1100, 128, mask=SMALL, sink=True, **PAIR),
    "sinks, head dim 256": Case(1100, 1100, 256, mask=SMALL, sink=True, **PAIR),
    "maxima": Case(1100, 1100, 128, mask=SMALL, max_scores=True, **PAIR),
    "maxima, sinks, dropout": Case(1101, 999, 64, mask=SMALL, max_scores=True, sink=True,
                                   dropout_p=0.2, **PAIR),
    "dropout": Case(1100, 1100, 128, mask=SMALL, dropout_p=0.2, **PAIR),
    "dropout, head dim 256": Case(1100, 1100, 256, mask=SMALL, dropout_p=0.2, **PAIR),
    "empty rows": Case(1100, 1000, 128, mask=SMALL & ~masks.documents([700, 400]), **PAIR),
    "empty rows, sinks, maxima": Case(1100, 1000, 128, mask=HOLE, max_scores=True,
                                      sink=True, **PAIR),
    "nothing": Case(1100, 1000, 64, mask=masks.causal() & ~masks.causal(), **PAIR),
    "parts": Case(2112, 8111, 128, mask=GLOBAL, **PAIR | {"batch": 1}),
    "parts, head dim 64": Case(2112, 8111, 64, mask=GLOBAL, **PAIR | {"batch": 1}),
    "parts, head dim 256": Case(2112, 8111, 256, mask=GLOBAL, **PAIR | {"batch": 1}),
    "parts, sinks, maxima": Case(2112, 8111, 128, mask=GLOBAL, max_scores=True, sink=True,
                                 **PAIR | {"batch": 1}),
    "parts, dropout": Case(2112, 8111, 128, mask=GLOBAL, dropout_p=0.2, **PAIR | {"batch": 1}),
    "few queries": Case(50, 1000, 128, mask=SMALL, **PAIR | {"batch": 33}),
    "few queries, dense": Case(64, 1000, 128, **PAIR | {"batch": 33}),
    "one query": Case(1, 1000, 64, **PAIR | {"batch": 33}, lse_gradient=False),
}  # fmt: skip
TINY = masks.random_blocks(0.15, block=16) & ~masks.global_rows(40)
THIN = masks.random_blocks(0.01, block=16)
LONG = masks.random_blocks(0.05, block=32) | masks.global_rows(32)
FOUR = PAIR | {"block_size": (32, 32)}
PACKED = {  # heads of a tile of one query block, and a case
    "four heads": (4, Case(1100, 1100, 128, mask=TINY, **FOUR)),
    "two heads, token-major": (2, Case(1090, 700, 64, mask=TINY, token_major=True,
                                       **FOUR | {"kv_heads": 4})),
    "blocks of 16": (4, Case(1100, 1100, 128, mask=TINY, **FOUR | {"block_size": (16, 16)})),
    "blocks of 16, eight heads": (8, Case(1000, 1100, 80, mask=TINY,
                                          **FOUR | {"block_size": (16, 64), "kv_heads": 1})),
    "blocks of 48": (4, Case(1100, 1100, 128, mask=THIN, **FOUR | {"block_size": (48, 128)})),
    "head dim 256": (4, Case(1100, 1100, 256, v_head_dim=128, mask=TINY, **FOUR)),
    "sinks, maxima": (4, Case(1101, 1000, 128, mask=TINY, sink=True, max_scores=True, **FOUR)),
    "sinks, maxima, head dim 32": (4, Case(1101, 1000, 32, mask=TINY, sink=True, max_scores=True,
                                           **FOUR)),
    "parts": (4, Case(2112, 8111, 128, mask=LONG, **FOUR | {"batch": 1})),
    "parts, sinks, maxima": (4, Case(2112, 8111, 64, mask=LONG, max_scores=True, sink=True,
                                     **FOUR | {"batch": 1})),
    "few queries": (4, Case(40, 1000, 128, mask=masks.random_blocks(0.2, block=16), **FOUR)),
}  # fmt: skip
APART = {  # beside them, groups and masks for which each head has tiles of its own
    "groups of three": Case(2200, 1100, 128, mask=SMALL, **PAIR | {"heads": 6}),
    "masks of their own": Case(
        1100, 1100, 128, mask=masks.random_blocks(0.3, block=64, per_head=True), **PAIR
    ),
}


@pytest.fixture(autouse=True)
def shared(monkeypatch):
    """Also at head dims up to 64 where rows are short, or alike enough for three consumers."""
    monkeypatch.setattr(forward, "TALL_GAIN", 0)
    monkeypatch.setattr(forward, "SHARED_KEYS", 0)


def heads_of_tiles(case, device="cuda"):
    """The query heads of a tile of the forward, and the parts of split tiles of a head."""
    schedule, problem = schedule_of(case, device), problem_of(*draw(case, device)[0])
    facts = schedule and schedule.facts
    tiles = forward_tiles_for(problem, facts, 132, schedule)
    lists = tile_lists(schedule, forward_spec(problem, tiles, 132), device)
    return tiles.heads, lists.n_parts


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", SHARED | APART)
def test_two_heads_share_tiles_of_64_queries(name, dtype):
    case = replace((SHARED | APART)[name], dtype=dtype)
    heads, parts = heads_of_tiles(case)
    assert heads == 1 + (name in SHARED) and (parts > 0 or "parts" not in name)  # as the name says
    check(case, "hopper", "cuda", slack=3.0 if case.n_q == 1 else 1.0)


@pytest.mark.parametrize("dtype", LOW)
@pytest.mark.parametrize("name", PACKED)
def test_heads_share_tiles_of_one_small_block(name, dtype):
    heads, case = PACKED[name]
    case = replace(case, dtype=dtype)
    found, parts = heads_of_tiles(case)
    assert found == heads and (parts > 0) == ("parts" in name)
    check(case, "hopper", "cuda")


@pairwise(block_q=[16, 32, 48, 64], block_k=[16, 32, 64, 128], head_dim=[32, 64, 128, 256])
def test_two_heads_share_tiles_of_every_block_size(block_q, block_k, head_dim):
    mask = masks.random_blocks(0.3, block=16, seed=block_q + block_k) | masks.local(20)
    mask = mask & ~masks.documents([500, 90, 500]) | masks.butterfly(32)
    case = Case(1090, 890, head_dim, mask=mask, **PAIR | {"block_size": (block_q, block_k)})
    assert heads_of_tiles(case)[0] >= 2
    check(case, "hopper", "cuda")


@pytest.mark.parametrize("name", [*SHARED, *PACKED])
def test_shared_tiles_have_the_same_results_again(name):
    """The forward adds in one order: a race would change its bits."""
    Runner(SHARED.get(name) or PACKED[name][1], "hopper").repeat(4)
