"""The hopper backend as far as it goes without a GPU: what it refuses, which forms it takes."""

import itertools
import re
from importlib import import_module

import pytest
import torch

import masks
from sparseflash import score_rules, select
from sparseflash.backends import hopper
from sparseflash.backends import triton as portable
from sparseflash.backends.hopper import backward, forward, passes, tma
from sparseflash.backends.protocol import DIRECTIONS
from sparseflash.backends.registry import reasons
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.kernels.common.versions import OVERRIDE
from sparseflash.plan import plan_for
from sparseflash.schedule.blocks import as_tensors, from_tensors, schedule_for
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.schedule.tile_spec import SPARE
from sparseflash.testing import make_qkv
from tests.problems import OnHopper, problem_of


@pytest.fixture
def capability(monkeypatch):
    """The compute capability of the GPU that `OnHopper` is on; a test may change it."""
    found = [(9, 0)]
    monkeypatch.setattr(hopper, "gluon_missing", lambda: None)
    monkeypatch.setattr(hopper, "nvidia_capability", lambda device: found[0])
    return found


@pytest.fixture
def multiprocessors(monkeypatch):
    """Those of an H200, where there is no GPU."""
    for module in (forward, backward, passes):
        monkeypatch.setattr(module, "multiprocessors", lambda device: 132)


def blank(batch, heads, n, head_dim, kv_heads, v_head_dim=None, dtype=torch.bfloat16):
    """q, k and v of zeros, for plans: random numbers take longer than they."""
    sizes = (heads, head_dim), (kv_heads, head_dim), (kv_heads, v_head_dim or head_dim)
    return [torch.zeros(batch, h, n, d, dtype=dtype) for h, d in sizes]


def inputs(*, head_dim=64, dtype=torch.bfloat16, **options):
    qkv = blank(2, 4, 256, head_dim, 2, dtype=dtype, **options)
    return [t.as_subclass(OnHopper) for t in qkv]


def reason(q, k, v, mask=None, direction="forward", **options) -> str | None:
    return hopper.unsupported(problem_of(q, k, v, mask, **options), direction)


def test_takes_16_bit_inputs_on_a_hopper_gpu(capability):
    for dtype in (torch.bfloat16, torch.float16):
        for head_dim, v_head_dim in ((64, None), (8, 256), (200, 72), (256, 8)):
            qkv = inputs(head_dim=head_dim, v_head_dim=v_head_dim, dtype=dtype)
            assert reason(*qkv) is None and reason(*qkv, dropout_p=0.5) is None


def test_takes_every_block_size(capability):
    for block in itertools.product((16, 48, 64, 128, 256), (16, 80, 128, 256)):
        mask = masks.local(40).build(256, block_size=block)
        for head_dim, direction in itertools.product((32, 128, 256), DIRECTIONS):
            assert reason(*inputs(head_dim=head_dim), mask, direction) is None, (block, head_dim)


def test_takes_the_layouts_that_models_have(capability):
    def token_major(*shape):
        return torch.zeros(*shape, dtype=torch.bfloat16).transpose(1, 2)

    packed = torch.zeros(2, 100, 3, 4, 64, dtype=torch.bfloat16)  # one projection for q, k and v
    odd = torch.zeros(64 + 3, dtype=torch.bfloat16)  # an axis of one may have any stride
    for qkv in (
        [packed[:, :, i].transpose(1, 2) for i in range(3)],
        [token_major(2, 100, heads, 40) for heads in (4, 2, 2)],
        [token_major(1, 1, heads, 40) for heads in (4, 2, 2)],
        [odd.as_strided((1, 1, 1, 64), (3, 5, 7, 1))] * 3,
    ):
        assert reason(*(t.as_subclass(OnHopper) for t in qkv)) is None


def misaligned(t):
    longer = torch.zeros(t.numel() + 1, dtype=t.dtype)
    return longer[1:].view(t.shape).as_subclass(OnHopper)


def narrowed(*widths):
    """Views of inputs of head dim 64, whose strides TMA takes."""
    return [t[..., :width] for t, width in zip(inputs(), widths, strict=True)]


REFUSED = {
    "float32": (lambda: inputs(dtype=torch.float32), "float32"),
    "float64": (lambda: inputs(dtype=torch.float64), "float64"),
    "head dim 4": (lambda: inputs(head_dim=4), "multiple.*16 bytes"),
    "head dim 12": (lambda: inputs(head_dim=12), "multiple.*16 bytes"),
    "head dim 12 of v": (lambda: inputs(v_head_dim=12), "of v.*multiple.*16 bytes"),
    "head dim 20 of 64": (lambda: narrowed(20, 20, 64), "head dim of q and k, 20, .*multiple of 8"),
    "head dim 20 of 64, of v": (lambda: narrowed(64, 64, 20), "head dim of v, 20, .*multiple of 8"),
    "head dim 264": (lambda: inputs(head_dim=264), "up to 256, not 264"),
    "head dim 264 of v": (lambda: inputs(v_head_dim=264), "up to 256, not 264"),
    "address": (lambda: [inputs()[0], misaligned(inputs()[1]), inputs()[2]], "k .*address"),
    "on the CPU": (lambda: [torch.Tensor(t) for t in inputs(dtype=torch.float32)], "CUDA.*cpu"),
}


def test_refuses_what_its_kernels_cannot_take(capability):
    for name, (make, words) in REFUSED.items():
        found = reason(*make())
        assert found and re.search(words, found), (name, found)
    for other in ((8, 0), (10, 0), (12, 0)):
        capability[0] = other
        found = reason(*inputs())
        assert found and "9.0" in found and "{}.{}".format(*other) in found


@pytest.mark.parametrize("block", [128, 256, 48])
def test_refuses_selections_whose_blocks_do_not_divide_by_its_tiles(block, capability):
    q, k, _ = make_qkv(2, 4, 256, 256, 64, kv_heads=2)
    picked = select.top_k(2, block_size=block)(q, k)
    found = reason(*inputs(), schedule_from_selection(picked, 256, 256, 2, 4, "cpu"))
    assert (found is None) == (block % 128 == 0)
    assert found is None or ("selection" in found and "48 x 48" in found)


@pytest.mark.parametrize(
    "head_dim, keys, dropout_p, deterministic",
    [
        (32, 8, 0.1, True),
        (64, 2, 0.0, False),
        (64, 8, 0.1, False),
        (128, 8, 0.0, True),
        (128, 8, 0.1, False),
        (256, 8, 0.0, False),
    ],
)
@pytest.mark.usefixtures("multiprocessors")
def test_a_plan_brings_every_list_that_is_walked(
    head_dim, keys, dropout_p, deterministic, monkeypatch
):
    """Also through the operators, which a schedule crosses as tensors and ints."""
    q, k, v = make_qkv(2, 4, 1024, 1024, head_dim, dtype=torch.bfloat16, kv_heads=2)
    picked = select.top_k(keys, block_size=128)(q, k) & masks.causal()
    schedule = schedule_from_selection(picked, 1024, 1024, 2, 4, "cpu")
    problem = problem_of(q, k, v, schedule, dropout_p=dropout_p, deterministic=deterministic)
    module = import_module("sparseflash.plan")
    monkeypatch.setattr(module, "choose", lambda problem, direction: hopper)
    planned, without = (
        plan_for(problem._replace(needs_grad=g), schedule=schedule) for g in (True, False)
    )
    lists = planned.lists(schedule)
    assert len(without.lists(schedule)) == 1

    def refuse(*call):
        raise AssertionError("made again")

    monkeypatch.setattr("sparseflash.schedule.tile_lists.dynamic_lists", refuse)
    brought = from_tensors(*as_tensors(schedule._replace(lists=lists)))
    assert brought.facts.lists == tuple(made.numbers for made in lists)
    again = planned.lists(brought)
    for ours, theirs in zip(again, lists, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(ours[:5], theirs[:5], strict=True))
        assert repr(ours.numbers) == repr(theirs.numbers)


@pytest.mark.parametrize("head_dim, v_head_dim", [(256, None), (192, 128), (64, 256), (136, 8)])
def test_the_backward_of_wide_heads_has_one_form(head_dim, v_head_dim, capability):
    """Whatever the rows and the dropout; what is deterministic goes to another backend."""
    qkv = inputs(head_dim=head_dim, v_head_dim=v_head_dim)
    small = masks.local(40).build(256, block_size=(16, 48))
    for mask, facts in ((None, None), (small, schedule_for(small, 256, 256, 1, 4, "cpu").facts)):
        assert reason(*qkv, mask, "backward", dropout_p=0.5) is None
        form = backward.backward_form(problem_of(*qkv, mask, dropout_p=0.5), facts)
        assert form.one_pass and form.cols.wide
        assert reason(*qkv, mask, deterministic=True) is None
        found = reason(*qkv, mask, "backward", deterministic=True)
        assert found and re.search("deterministic backward holds head dims up to 128, not", found)


@pytest.mark.parametrize(
    "n, block, head_dim",
    [(1000, None, 64), (1088, 128, 128), (1000, 64, 128), (1088, 16, 64), (1000, 64, 256)],
)
def test_entries_of_grouped_heads_are_places_in_dq(n, block, head_dim, multiprocessors):
    """So no kernel divides: heads lie as many blocks apart in dQ as in the lists of their group."""
    qkv, schedule, blocks = blank(2, 6, n, head_dim, 2), None, None
    if block:
        blocks = masks.causal().build(n, block_size=block)
        schedule = schedule_for(blocks, n, n, 2, 6, "cpu")
    made = backward.Backward(problem_of(*qkv, blocks), schedule)
    lists, n_pad = tile_lists(schedule, made.specs[0], "cpu"), made.buffer[2]
    if lists.gather > 1:  # entries of several pieces are divided, and may name a missing one
        assert n_pad >= n + lists.minor // lists.gather
        return
    assert n_pad >= n and n_pad % lists.minor == 0
    of_head = n_pad // lists.minor
    entries = set(lists.idx[:-SPARE].flatten().tolist())
    assert {head * of_head + j for head in range(3) for j in range(-(-n // lists.minor))} == entries


def test_selections_of_64_have_tiles_of_their_own(capability):
    """Nobody knows whether their neighbours are alike."""
    facts = schedule_for(masks.causal().build(4096, block_size=64), 4096, 4096, 1, 4, "cpu").facts
    problem = problem_of(*inputs(head_dim=128))._replace(mask=facts)
    assert backward.backward_form(problem, facts).cols.major == 64
    assert hopper.unsupported(problem, "backward") is None
    problem = problem._replace(options=problem.options._replace(dropout_p=0.1))
    found = hopper.unsupported(problem, "backward")
    assert found and "tiles of 64 queries x 128 keys" in found


def test_auto_leaves_biases_of_pairs_to_triton(capability):
    """Where triton reads them in wide accesses, and no backend is named."""
    for n, head_dim, left in ((256, 64, True), (250, 64, False), (256, 256, False)):
        score = score_rules.pair(bias=torch.zeros(2, 4, n, n))
        qkv = [t.as_subclass(OnHopper) for t in blank(2, 4, n, head_dim, 2)]
        problem = problem_of(*qkv)
        options = problem.options._replace(score=score.key())
        for backend in ("auto", "hopper"):
            own = problem._replace(options=options._replace(backend=backend))
            found = hopper.unsupported(own, "forward")
            assert (found is not None) == (left and backend == "auto")


def test_what_is_allocated_fits_tma_whatever_the_strides():
    t = torch.empty(2, 3, 40, 64, dtype=torch.bfloat16)
    columns = torch.empty(2, 3, 64, 40, dtype=torch.bfloat16).transpose(2, 3)
    for like in (t, t.transpose(1, 2), columns, t[:1, :1, :1].expand(t.shape), t[:, :, ::2]):
        found = tma.empty_like(like)
        assert found.shape == like.shape and tma.fits_tma(found)
    assert tma.empty_like(t.transpose(1, 2)).stride() == t.transpose(1, 2).stride()


TALL = {
    # options: queries of a tile of the forward, 192 where neighbouring queries are alike
    "dense": ({}, 192),
    "head dim 40": ({"head_dim": 40, "v_head_dim": 56}, 192),
    "causal, blocks of 16": ({"mask": masks.causal(), "block": 16}, 192),
    "wide window": ({"mask": masks.local(1000), "n": 16384}, 192),
    "heads": ({"mask": masks.heads(*[masks.causal(), masks.local(2000)] * 8)}, 192),
    "head dim 72": ({"head_dim": 72, "n": 16384}, 128),
    "wider v": ({"v_head_dim": 128}, 128),
    "dropout": ({"dropout_p": 0.1}, 128),
    "few tiles": ({"n": 1024, "heads": 4, "batch": 1}, 128),
    "random blocks": ({"mask": masks.random_blocks(0.2, block=128)}, 128),
    "narrow window": ({"mask": masks.local(100), "n": 16384}, 128),
}


def rows_of_a_tile(
    mask=None, n=8192, *, batch=2, heads=16, block=128, head_dim=64, v_head_dim=None, **options
) -> int:
    shape = batch, heads, n
    q, k = (torch.empty(*shape, head_dim, dtype=torch.bfloat16, device="meta") for _ in range(2))
    v = torch.empty(*shape, v_head_dim or head_dim, dtype=torch.bfloat16, device="meta")
    schedule = None
    if mask is not None:
        mask = mask.build(n, block_size=block, heads=heads if mask.per_head else None)
        schedule = schedule_for(mask, n, n, batch, heads, "cpu")
    problem, facts = problem_of(q, k, v, mask, **options), schedule and schedule.facts
    return forward.forward_tiles_for(problem, facts, 132, schedule).major


def test_tiles_of_192_queries_where_neighbours_are_alike():
    for name, (options, major) in TALL.items():
        assert rows_of_a_tile(**options) == major, name


# ---- versions of Triton


def answers(version: str, monkeypatch) -> dict[str, str | None]:
    """What the backends answer on a Hopper GPU with a version of Triton."""
    pytest.importorskip("triton")
    monkeypatch.setattr(hopper, "_triton", lambda: version)
    for module in (hopper, portable):
        monkeypatch.setattr(module, "nvidia_capability", lambda device: (9, 0))
    hopper.gluon_missing.cache_clear()
    found = reasons(problem_of(*inputs()), "backward")
    hopper.gluon_missing.cache_clear()
    return found


@pytest.mark.parametrize("version", ["3.6.0", "3.8.0", "3.9.0+git1234", "3.9.1"])
def test_tested_versions_run(version, monkeypatch):
    assert answers(version, monkeypatch)["hopper"] is None


@pytest.mark.parametrize("version", ["2.1.0", "3.5.1", "3.10.0", "4.1.0"])
def test_other_versions_are_refused_and_the_triton_backend_runs(version, monkeypatch):
    found = answers(version, monkeypatch)
    assert found["triton"] is None and version in str(found["hopper"])


def test_a_variable_lets_newer_versions_run_and_older_ones_not(monkeypatch):
    monkeypatch.setenv(OVERRIDE, "1")
    assert answers("3.10.0", monkeypatch)["hopper"] is None
    assert answers("3.5.1", monkeypatch)["hopper"]
