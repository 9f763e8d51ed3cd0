"""The forward of hopper with three consumers: tiles of 192 queries, at head dims from 33 to 64."""

from dataclasses import replace

import pytest
import torch

import masks
from sparseflash.backends.hopper import forward
from sparseflash.schedule.tile_lists import tile_lists
from tests.attention_cases import LOW, Case, build, check, draw, schedule_of
from tests.gpu.random_calls import Runner
from tests.gpu.test_sinks import GLOBAL, HOLE, NONE
from tests.gpu_calls import HOPPER, pairwise
from tests.problems import problem_of

pytestmark = HOPPER

STRUCTURED = masks.local(150) | masks.butterfly(128) | masks.global_tokens(40)
PER_HEAD = masks.random_blocks(0.3, block=64, per_head=True)
LENGTHS = [1, 64, 100, 191, 192, 193, 383, 384, 385, 1000, 5000]


@pytest.fixture(autouse=True)
def tall(monkeypatch):
    """Tiles of 192 queries wherever there is a kernel for them."""
    monkeypatch.setattr(forward, "TALL_GAIN", 1e9)
    monkeypatch.setattr(forward, "TALL_KEYS", 0)


def check_tall(case: Case) -> None:
    assert planned(case).tiles.consumers == 3  # the case is about them
    check(case, "hopper", "cuda", 3.0 if case.n_q < 100 else 1.0)


def planned(case: Case) -> forward.Forward:
    problem = problem_of(*draw(case, "cuda")[0], build(case, "cuda")[0])
    return forward.Forward(problem, schedule_of(case))


@pairwise(length=LENGTHS, head_dim=[40, 48, 56, 64], dtype=LOW, sink=[False, True])
def test_dense(length, head_dim, dtype, sink):
    check_tall(Case(length, length, head_dim, dtype, max_scores=True, sink=sink))


@pairwise(
    mask=[masks.causal(), masks.local(300), STRUCTURED],
    block=[(128, 128), (64, 64), (32, 16), (16, 16), (192, 128), (256, 96)],
    head_dim=[40, 48, 56, 64],
    dtype=LOW,
    sink=[False, True],
)
def test_masks(mask, block, head_dim, dtype, sink):
    options = {"mask": mask, "block_size": block, "sink": sink, "max_scores": sink}
    for n_q, n_k in ((1000, 1000), (193, 1900), (1900, 130)):
        check_tall(Case(n_q, n_k, head_dim, dtype, **options))


@pytest.mark.parametrize("mask", [masks.causal(), masks.local(500)], ids=str)
def test_long(mask):
    check_tall(Case(5000, 5000, 64, torch.bfloat16, mask=mask))


@pytest.mark.parametrize("head_dim, v_head_dim", [(40, 64), (64, 48), (56, 40), (48, 56)])
def test_values_of_another_head_dim(head_dim, v_head_dim):
    for mask in (None, STRUCTURED):
        check_tall(Case(700, 1000, head_dim, torch.float16, mask=mask, v_head_dim=v_head_dim))


@pairwise(
    mask=[None, STRUCTURED, PER_HEAD],
    kv_heads=[1, 2, 4],
    block=[(128, 128), (64, 64), (16, 64)],
    head_dim=[48, 64],
)
def test_batch_groups_and_masks_of_their_own(mask, kv_heads, block, head_dim):
    shape = {"batch": 2, "heads": 4, "kv_heads": kv_heads, "token_major": kv_heads == 2}
    check_tall(Case(890, 777, head_dim, torch.bfloat16, mask=mask, block_size=block, **shape))


PARTS = {
    "long rows": Case(8100, 8111, 64, heads=1, kv_heads=1, mask=GLOBAL, sink_mean=9.0),
    "few queries": Case(150, 65500, 64, mask=masks.dense(), sink_mean=11.0),
    "some heads": Case(
        4000, 4000, 48, batch=2, heads=4, kv_heads=2, sink_mean=8.0,
        mask=masks.heads(masks.local(50), GLOBAL, masks.butterfly(64), GLOBAL),
    ),
}  # fmt: skip


@pairwise(name=PARTS, sink=[False, True], head_dim=[48, 64])
def test_rows_in_parts(name, sink, head_dim):
    options = {"dtype": torch.bfloat16, "sink": sink, "max_scores": True}
    case = replace(PARTS[name], head_dim=head_dim, **options)
    assert tile_lists(schedule_of(case), planned(case).specs[0], "cuda").n_parts > 0
    check_tall(case)


@pairwise(
    mask=[HOLE, masks.heads(HOLE, NONE), NONE],
    block=[(128, 128), (64, 64), (16, 32)],
    sink=[False, True],
    head_dim=[48, 64],
)
def test_rows_with_nothing(mask, block, sink, head_dim):
    """In whole tiles of them, and beside rows that attend to something."""
    options = {"mask": mask, "block_size": block, "sink": sink, "max_scores": True}
    check_tall(Case(1000, 1000, head_dim, torch.float16, **options))


@pytest.mark.parametrize("head_dim", [48, 64])
@pytest.mark.parametrize("mask", [None, masks.causal(), PER_HEAD])
def test_the_same_bits_again_and_again(mask, head_dim):
    """Many tiles to a program, short and long lists: a race would change bits, or hang."""
    case = Case(2500, 2400, head_dim, torch.bfloat16, batch=2, heads=16, kv_heads=8, mask=mask)
    check_tall(case)
    Runner(case, "hopper").repeat(20)


def test_without_being_told_to(monkeypatch):
    """A shape for which they are the rule: a wave of tiles of 192, or two of 128."""
    monkeypatch.undo()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    case = Case(1100, 1100, 64, torch.bfloat16, heads=sms // 6, kv_heads=sms // 6)
    check_tall(case)
