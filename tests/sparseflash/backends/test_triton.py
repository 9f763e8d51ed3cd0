"""The Triton kernels in Triton's interpreter: float32 and float16 against the float64 oracle."""

import pytest
import torch

import masks
import sparseflash
from sparseflash.backends import triton as backend
from sparseflash.kernels.portable import tma
from sparseflash.testing import make_qkv
from tests.attention_cases import HEAD_DIMS, INTERPRETER_LENGTHS, Case, check, random_case
from tests.op_cases import INTERPRETED
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


def test_masks_that_differ_by_batch_and_head():
    array = torch.rand(2, 4, 40, 50, generator=torch.Generator().manual_seed(0)) < 0.5
    mask, options = masks.mask_from(array.numpy()), {"heads": 4, "kv_heads": 2, "batch": 2}
    check(Case(40, 50, 16, mask=mask, block_size=(32, 32), **options), "triton", "cpu")


def test_heads_side_by_side():
    """In a matrix that a descriptor sees, the tile of a head begins at a column of its own."""
    case = Case(130, 140, 16, heads=4, v_head_dim=32, batch=2, token_major=True)
    check(case, "triton", "cpu")


@pytest.fixture
def no_plans():
    """The cache of plans, empty before and after: plans hold the tiles they were made with."""
    sparseflash.clear_cache()
    yield
    sparseflash.clear_cache()


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
def test_tiles_of_other_gpus(family, head_dim, monkeypatch, no_plans):
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
