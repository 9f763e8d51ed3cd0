"""`attention` under torch.compile."""

import shutil
from importlib import import_module

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import masks
import sparseflash
from sparseflash import select
from sparseflash.testing import make_qkv
from tests.op_cases import MASK, assert_same, run, small

COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
        ),
    ),
]


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize(
    "mask",
    [
        pytest.param(None, id="None"),
        pytest.param(MASK, id="Mask"),
        pytest.param(masks.random_blocks(0.5, block=16, per_head=True), id="Mask per head"),
        pytest.param(MASK.build(40, block_size=32), id="BlockMask"),
        pytest.param(masks.mask_from(np.arange(1600).reshape(40, 40) % 7 < 3), id="array"),
    ],
)
def test_compiled_attention_equals_eager(mask, compiler, fresh_dynamo):
    def function(q, k, v, mask):
        return sparseflash.attention(q * 2, k, v, mask) + 1

    compiled = torch.compile(function, fullgraph=True, backend=compiler)
    assert_same(run(compiled, small(), mask), run(function, small(), mask))


BUILT_INSIDE = {
    "leaf": lambda: masks.local(5),
    "causal": lambda: masks.causal(),
    "or, and": lambda: (masks.local(3) | masks.butterfly(16)) & masks.causal(),
    "without": lambda: masks.sliding(20) - masks.local(2),
    "global, random": lambda: masks.global_tokens(3) | masks.random_blocks(0.3, block=16),
}


@pytest.mark.parametrize("known", [False, True], ids=["new", "equal to a living mask"])
@pytest.mark.parametrize("build", BUILT_INSIDE.values(), ids=BUILT_INSIDE)
def test_mask_built_inside_a_compiled_function_equals_eager(build, known, fresh_dynamo):
    def function(q, k, v):
        return sparseflash.attention(q, k, v, build())

    living = build() if known else None
    actual = run(torch.compile(function, fullgraph=True, backend="aot_eager"), small())
    assert_same(actual, run(function, small()))
    del living


def test_compiled_attention_takes_the_plan_of_every_call(fresh_dynamo):
    """One graph, whose lists are inputs."""
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend=counter)
    selector = select.top_k(2, block_size=16)
    for seed in range(3):
        qkv = make_qkv(2, 2, 40, 40, 8, seed=seed, requires_grad=True)
        picked = selector(*qkv[:2])
        plan = sparseflash.plan(picked, *qkv)
        assert_same(run(compiled, qkv, plan), run(sparseflash.attention, qkv, picked))
    assert counter.frame_count == 1


def test_compiled_attention_follows_changes_of_mask(fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    for mask in (masks.causal(), masks.local(4), None, masks.causal(), masks.local(5)):
        assert_same(run(compiled, small(), mask), run(sparseflash.attention, small(), mask))


@pytest.mark.parametrize("mask", [None, MASK], ids=["None", "Mask"])
def test_compiled_attention_follows_changes_of_length(mask, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend=counter)
    lengths = (40, 33, 64, 17, 40)
    for length in lengths:
        assert_same(
            run(compiled, small(length), mask), run(sparseflash.attention, small(length), mask)
        )
    # without a mask a graph serves every length; a schedule belongs to one length
    assert counter.frame_count <= (2 if mask is None else len(set(lengths)))


def test_compiled_attention_with_a_block_mask_of_another_length_fails(fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    blocks = masks.causal().build(40)
    compiled(*small(), blocks)
    with pytest.raises(Exception, match="the mask is for 40 queries"):
        compiled(*small(41), blocks)


def test_compiled_dropout_draws_what_eager_draws(fresh_dynamo):
    def function(q, k, v, seed=None):
        return sparseflash.attention(q, k, v, MASK, dropout_p=0.4, seed=seed)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    for seed in (None, 5, torch.tensor(6)):
        results = []
        for call in (compiled, function):
            torch.manual_seed(1)
            results.append(run(call, small(), seed))
        assert_same(*results)


def test_compiled_lse_and_its_gradient_equal_eager(fresh_dynamo):
    def function(q, k, v):
        out, lse = sparseflash.attention(q, k, v, masks.causal(), return_lse=True)
        return out * lse.unsqueeze(-1)

    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    assert_same(run(compiled, small()), run(function, small()))


def test_compiled_attention_under_autocast_equals_eager(fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = (run(call, small(), MASK) for call in (compiled, sparseflash.attention))
    assert actual[0].dtype == torch.bfloat16
    assert_same(actual, expected)


@pytest.mark.parametrize(
    "mask",
    [np.ones((40, 40), bool), torch.ones(40, 40, dtype=torch.bool)],
    ids=["numpy", "tensor"],
)
def test_array_inside_a_compiled_function_names_mask_from(mask, fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="build it outside with mask_from"):
        compiled(*small(), mask)


def test_compiled_attention_with_another_head_dim_of_v_equals_eager(fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    qkv = small(v_head_dim=12)
    assert_same(run(compiled, qkv, MASK), run(sparseflash.attention, qkv, MASK))


@pytest.mark.parametrize("mask", [None, MASK], ids=["None", "Mask"])
def test_one_compiled_function_takes_several_head_dims(mask, fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    for head_dim in (8, 16, 12, 32):
        qkv = make_qkv(2, 2, 40, 40, head_dim, kv_heads=1)
        assert_same(run(compiled, qkv, mask), run(sparseflash.attention, qkv, mask))


@pytest.mark.parametrize("mask", [None, MASK], ids=["None", "Mask"])
def test_dynamic_shapes_take_few_graphs(mask, fresh_dynamo):
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(sparseflash.attention, fullgraph=True, dynamic=True, backend=counter)
    for length, head_dim in ((40, 8), (33, 16), (64, 24), (17, 12)):
        qkv = make_qkv(2, 2, length, length, head_dim, kv_heads=1)
        assert_same(run(compiled, qkv, mask), run(sparseflash.attention, qkv, mask))
    assert counter.frame_count <= 2


def test_compiled_scale_is_that_of_the_call(fresh_dynamo):
    def function(q, k, v, scale):
        return sparseflash.attention(q, k, v, MASK, scale=scale)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for scale in (0.3, 0.7, 1):
        assert_same(run(compiled, small(), scale), run(function, small(), scale))
    with pytest.raises(Exception, match="positive and finite"):
        compiled(*small(), -1.0)


def test_compiled_call_takes_the_plan_of_an_eager_one(fresh_dynamo, monkeypatch):
    """Nothing is chosen, built or prepared again."""
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    expected = run(sparseflash.attention, small(), MASK)
    monkeypatch.setattr("sparseflash.ops.plan_for", None)
    assert_same(run(compiled, small(), MASK), expected)


def test_compiled_backend_that_cannot_run_is_refused_before_anything_runs(
    fresh_dynamo, monkeypatch
):
    module = import_module("sparseflash.backends.cpu")
    refuse = lambda problem, direction: "no backward" if direction == "backward" else None  # noqa: E731
    monkeypatch.setattr(module, "unsupported", refuse)
    monkeypatch.setattr(module, "_forward", None)  # nothing may run
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match="'cpu' cannot run the backward of this call"):
        compiled(*small(), MASK, backend="cpu")
