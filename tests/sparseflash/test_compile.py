"""`attention` under torch.compile, and the layer in torch.export."""

import shutil

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import masks
import sparseflash
from sparseflash import BlockSparseAttention, Rotary, select
from tests.op_cases import MASK, assert_same, run, small

pytestmark = pytest.mark.usefixtures("fresh_dynamo")
NO_COMPILER = not (shutil.which("g++") or shutil.which("clang++"))


def attention(q, k, v, mask, **options):
    """By the backend that takes least time here: graphs are the same."""
    return sparseflash.attention(q, k, v, mask, backend="cpu", **options)


def compiled(function, compiler="aot_eager", **options):
    return torch.compile(function, fullgraph=True, backend=compiler, **options)


def graphs_of(function, calls, compiler="aot_eager", **options) -> int:
    """How many graphs serve the calls (qkv, ...), whose results are those of eager calls."""
    counter = CompileCounterWithBackend(compiler)
    call = compiled(function, counter, **options)
    for qkv, *rest in calls:
        assert_same(run(call, qkv, *rest), run(function, qkv, *rest))
    return counter.frame_count


GIVEN = {
    "Mask per head": masks.random_blocks(0.5, block=16, per_head=True),
    "blocks of 32": MASK.build(40, block_size=32),
    "array": masks.mask_from(np.arange(1600).reshape(40, 40) % 7 < 3),
}


def between(q, k, v, mask):
    return attention(q * 2, k, v, mask) + 1


@pytest.mark.parametrize("mask", GIVEN.values(), ids=GIVEN)
def test_masks_of_every_form(mask):
    graphs_of(between, [(small(), mask)])


def test_the_compiler_that_users_have():
    """Among products, which it calls as they are: C++ of its own would take it half a minute."""
    weight = torch.randn(8, 8)

    def function(q, k, v, mask):
        return attention(q @ weight, k, v @ weight, mask) @ weight

    graphs_of(function, [(small(), GIVEN["Mask per head"])], "inductor")


def joined():
    return (masks.local(3) | masks.random_blocks(0.3, block=16)) & masks.causal() - masks.sinks(2)


@pytest.mark.parametrize("build, known", [(joined, False), (lambda: masks.local(5), True)])
def test_masks_built_inside(build, known):
    """New ones, and such as are equal to a living mask."""

    def function(q, k, v):
        return attention(q, k, v, build())

    living = build() if known else None
    graphs_of(function, [(small(),)])
    del living


def test_a_plan_for_every_call_takes_one_graph():
    """The lists are its inputs."""
    selector = select.top_k(2, block_size=16)
    calls = []
    for seed in range(2):
        qkv = small(seed=seed)
        calls.append((qkv, sparseflash.plan(selector(*qkv[:2]), *qkv, backend="cpu")))
    assert graphs_of(attention, calls) == 1


def test_one_graph_serves_the_plans_of_many_masks():
    """Such as a window that grows from step to step."""
    calls = []
    for seed, window in enumerate(range(10, 100, 10)):
        qkv, mask = small(120, seed=seed), masks.sliding(window) | masks.sinks(2)
        plan = sparseflash.plan(mask.build(120, block_size=16), *qkv, backend="cpu")
        calls.append((qkv, plan))
        assert_same(run(attention, qkv, plan), run(attention, qkv, mask))
    assert graphs_of(attention, calls) <= 2  # the second has the sizes as symbols


def test_numbers_of_masks_may_become_symbols():
    def function(q, k, v, w):
        return attention(q, k, v, masks.sliding(w) & masks.causal() | masks.local_2d((8, 5), w))

    graphs_of(function, [(small(), w) for w in (3, 4, 5)])


def test_lengths_take_one_graph_for_every_n():
    """Also where blocks of padding could be skipped: at 1,024 tokens."""

    def function(q, k, v, lengths):
        return attention(q, k, v, MASK, lengths=lengths)

    calls = [(small(n), torch.tensor([n, n // 3])) for n in (40, 100, 1024)]
    assert graphs_of(function, calls) <= 2


def test_changes_of_mask():
    given = (masks.causal(), None, masks.causal())
    graphs_of(attention, [(small(), mask) for mask in given])


def test_changes_of_length():
    """Without a mask a graph serves every length."""
    assert graphs_of(attention, [(small(length), None) for length in (40, 33, 40)]) <= 2


def test_dynamic_shapes_take_few_graphs():
    sizes = ((40, 8), (33, 16), (64, 24))
    assert graphs_of(attention, [(small(*size), MASK) for size in sizes], dynamic=True) <= 2


def test_dropout_draws_what_eager_draws():
    def function(q, k, v, seed=None):
        return attention(q, k, v, MASK, dropout_p=0.4, seed=seed)

    for seed in (None, 5, torch.tensor(6)):
        results = []
        for call in (compiled(function), function):
            torch.manual_seed(1)
            results.append(run(call, small(), seed))
        assert_same(*results)


def test_lse_and_its_gradient():
    def function(q, k, v):
        out, lse = attention(q, k, v, masks.causal(), return_lse=True)
        return out * lse.unsqueeze(-1)

    graphs_of(function, [(small(),)])


REFUSED = {
    "length": (41, MASK.build(40), "the mask is for 40 queries"),
    "numpy": (40, np.ones((40, 40), bool), "build it outside with mask_from"),
    "tensor": (40, torch.ones(40, 40, dtype=torch.bool), "build it outside with mask_from"),
}


@pytest.mark.parametrize("length, mask, message", REFUSED.values(), ids=REFUSED)
def test_masks_that_are_refused(length, mask, message):
    call = compiled(attention)
    call(*small(), MASK.build(40))
    with pytest.raises(Exception, match=message):
        call(*small(length), mask)


# ---- the layer in torch.export and AOTInductor

BATCH, N = Dim("batch", min=2, max=64), Dim("n", min=2, max=4096)


def exported(dim: int, **given: torch.Tensor):
    """A layer, and its program for every batch and length."""
    layer = BlockSparseAttention(dim, 2, mask=masks.local(5), rotary=Rotary()).eval()
    x = torch.randn(3, 40, dim)
    dynamic = {"x": {0: BATCH, 1: N}} | {name: {0: BATCH} for name in given}
    with torch.no_grad():
        return layer, torch.export.export(layer, (x,), given, dynamic_shapes=dynamic)


def test_batch_and_length_stay_open():
    layer, program = exported(16)
    x = torch.randn(5, 33, 16)
    torch.testing.assert_close(program.module()(x), layer(x))
    layer, program = exported(16, lengths=torch.tensor([40, 3, 7]))
    x, lengths = torch.randn(2, 128, 16), torch.tensor([128, 100])
    found, wanted = program.module()(x, lengths=lengths), layer(x, lengths=lengths)
    torch.testing.assert_close(found, wanted)
    layer, program = exported(16, context=torch.randn(3, 24, 16))
    x, context = torch.randn(2, 30, 16), torch.randn(2, 24, 16)
    found, wanted = program.module()(x, context=context), layer(x, context=context)
    torch.testing.assert_close(found, wanted)


@pytest.mark.slow
@pytest.mark.skipif(NO_COMPILER, reason="needs a C++ compiler")
def test_aot_inductor(tmp_path):
    layer, program = exported(16)
    path = str(tmp_path / "layer.pt2")
    once = {"aot_inductor.precompile_headers": False}  # it compiles one program
    torch._inductor.aoti_compile_and_package(program, package_path=path, inductor_configs=once)
    x = torch.randn(5, 33, 16)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), layer(x))


def test_the_graph_breaks_where_masks_of_selectors_are_built():
    selector = (
        select.moba(32, 2, block_size=16),
        select.top_k(2, block_size=16, within=masks.local(11)),
    )

    def function(q, k, v, i):
        return attention(q, k, v, selector[i](q, k))

    for i in range(2):
        sparseflash.clear_cache()
        qkv = small()
        found = run(torch.compile(function, backend="aot_eager"), qkv, i)
        assert_same(found, run(function, qkv, i))


def test_scores_may_be_arguments():
    def function(q, k, v, score):
        return attention(q, k, v, MASK, score=score)

    caps = [sparseflash.score_rules.softcap(c) for c in (1.0, 2.0, 3.0)]
    graphs_of(function, [(small(), cap) for cap in caps])
