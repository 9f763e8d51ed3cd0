"""Which forwards of the hopper backend take tiles of 192 queries, and what these have on chip."""

import pytest
import torch

import masks
from sparseflash import select
from sparseflash.backends.hopper import forward, self_check
from sparseflash.kernels.hopper.configs import forward_tiles
from sparseflash.problem import Problem
from sparseflash.schedule import Schedule, schedule_for
from sparseflash.select.schedule import schedule_from_selection
from sparseflash.testing import make_qkv
from tests.problems import problem_of

SMS = 132
MANY = {"batch": 2, "heads": 16}
RANDOM = masks.random_blocks(0.2, block=128)


def posed(
    mask=None, n=8192, *, batch=1, heads=1, block=128, head_dim=64, v_head_dim=None, **options
) -> tuple[Problem, Schedule | None]:
    """A problem in tensors without memory, and its schedule."""
    shape = batch, heads, n
    q, k = (torch.empty(*shape, head_dim, dtype=torch.bfloat16, device="meta") for _ in range(2))
    v = torch.empty(*shape, v_head_dim or head_dim, dtype=torch.bfloat16, device="meta")
    schedule = None
    if mask is not None:
        mask = mask.build(n, block_size=block, heads=heads if mask.per_head else None)
        schedule = schedule_for(mask, n, n, batch, heads, "cpu")
    return problem_of(q, k, v, mask, **options), schedule


def rows_of_a_tile(*given, **options) -> int:
    problem, schedule = posed(*given, **options)
    facts = None if schedule is None else schedule.facts
    return forward.forward_tiles_for(problem, facts, SMS, schedule).major


TALL = {
    "dense": {**MANY},
    "head dim 40": {**MANY, "head_dim": 40, "v_head_dim": 56},
    "a wave less": {"n": 1100, "heads": 16},
    "one tile for two": {"n": 190, "batch": 64, "heads": 16},
    "causal": {**MANY, "mask": masks.causal()},
    "causal, blocks of 64": {**MANY, "mask": masks.causal(), "block": 64},
    "causal, blocks of 16": {**MANY, "mask": masks.causal(), "block": 16},
    "wide window": {**MANY, "mask": masks.local(1000), "n": 16384},
    "documents": {**MANY, "mask": masks.documents([3 * 1024] * 5), "n": 15360},
    "random rows of 384": {**MANY, "mask": masks.random_blocks(0.4, block=384), "block": 192,
                           "n": 384 * 20},
    "heads of their own": {**MANY, "mask": masks.heads(*[masks.causal(), masks.local(2000)] * 8)},
}  # fmt: skip
USUAL = {
    "head dim 32": ({**MANY, "head_dim": 32}, 128),
    "head dim 72": ({**MANY, "head_dim": 72, "n": 16384}, 128),
    "one tile for one": ({"n": 128, "batch": 64, "heads": 16}, 128),
    "wider v": ({**MANY, "v_head_dim": 128}, 128),
    "narrower v": ({**MANY, "v_head_dim": 32}, 128),
    "dropout": ({**MANY, "dropout_p": 0.1}, 128),
    "few tiles": ({"n": 1024, "heads": 4}, 128),
    "as many waves": ({"n": 2048, "heads": 16}, 128),
    "two tiles for two": ({"n": 200, "batch": 64, "heads": 16}, 128),
    "short": ({"n": 64, "batch": 64, "heads": 16}, 64),
    "random blocks": ({**MANY, "mask": RANDOM}, 128),
    "random blocks of 64": ({**MANY, "mask": masks.random_blocks(0.2, block=64), "block": 64}, 64),
    "narrow window": ({**MANY, "mask": masks.local(100), "n": 16384}, 128),
    "short causal": ({**MANY, "mask": masks.causal(), "n": 2048}, 128),
}


@pytest.mark.parametrize("name", TALL)
def test_where_neighbouring_queries_are_alike(name):
    assert rows_of_a_tile(**TALL[name]) == 192


@pytest.mark.parametrize("name", USUAL)
def test_where_it_does_not_pay(name):
    options, major = USUAL[name]
    assert rows_of_a_tile(**options) == major


def test_not_for_selections():
    """Nobody knows whether their neighbours are alike, and their blocks do not divide by 192."""
    q, k, _ = make_qkv(2, 16, 2048, 2048, 64)
    picked = select.top_k(16, block_size=128)(q, k)
    schedule = schedule_from_selection(picked, 2048, 2048, 2, 16, "cpu")
    problem, _ = posed(n=2048, **MANY)
    problem = problem._replace(mask=schedule.facts)
    assert forward.forward_tiles_for(problem, schedule.facts, SMS).major == 128


@pytest.mark.parametrize("mask", [None, masks.causal()])
def test_a_plan_takes_them(mask, monkeypatch):
    monkeypatch.setattr(forward, "multiprocessors", lambda device: SMS)
    planned = forward.Forward(*posed(mask, **MANY))
    assert planned.specs[0][:3] == (True, 192, 128) and planned.specs[0].sms == SMS


@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
def test_with_dropout_there_are_no_registers_for_q(dropout_p, monkeypatch):
    monkeypatch.setattr(forward, "multiprocessors", lambda device: SMS)
    planned = forward.Forward(*posed(RANDOM, **MANY, dropout_p=dropout_p))
    assert planned.tiles.consumers == 2 and planned.keep_q == (not dropout_p)


def test_the_self_check_has_one():
    majors = {
        rows_of_a_tile(
            check.mask, check.n, heads=check.heads, head_dim=check.head_dim,
            dropout_p=check.dropout_p,
        )
        for check in self_check.CHECKS
    }  # fmt: skip
    assert majors == {128, 192}


@pytest.mark.parametrize("tall", [False, True])
@pytest.mark.parametrize("block_q", [64, 128])
@pytest.mark.parametrize(
    "head_dim, v_head_dim", [(32, 32), (64, 64), (48, 40), (64, 128), (256, 8), (96, 72), (128, 80)]
)
def test_registers_and_shared_memory(head_dim, v_head_dim, block_q, tall):
    tiles = forward_tiles(head_dim, v_head_dim, block_q, 4096, tall=tall)
    found = forward._registers(tiles)
    own, feed = found["REGISTERS"], found["FEED_REGISTERS"]
    assert own % 8 == feed % 8 == found["maxnreg"] % 8 == 0 and feed >= 24
    assert 128 * tiles.programs * (own * tiles.consumers + feed) <= 65536
    assert own * tiles.consumers + feed <= found["maxnreg"] * (tiles.consumers + 1)
    if tiles.consumers == 3:
        assert (own, feed, found["maxnreg"]) == (160, 32, 128)
    places = tiles.consumers * 64 * max(tiles.width, tiles.width_v) * (1 if tiles.drain else 2)
    rings = tiles.minor * (tiles.k_stages * tiles.width + tiles.v_stages * tiles.width_v)
    assert 2 * (places + rings) <= 227 * 1024 // tiles.programs - 1024
