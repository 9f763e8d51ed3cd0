"""The operators as torch sees them, and `attention` under autocast and autograd."""

from functools import partial
from importlib import import_module

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import masks
import sparseflash
from sparseflash import attention, plan, select
from sparseflash.operators import attention as ops
from sparseflash.plan import Plan
from sparseflash.testing import assert_close, make_qkv, relative_error
from tests.op_cases import (
    BACKENDS,
    MASK,
    assert_same,
    detached,
    exact,
    plans,
    run,
    small,
    token_major,
)

backends = pytest.mark.parametrize("backend", BACKENDS)
two_backends = pytest.mark.parametrize("backend", ["reference", "cpu"])


def attend(q, k, v, backend="auto", mask=MASK, **options):
    return sparseflash.attention(q, k, v, mask, backend=backend, **options)


# ---- opcheck

LAYOUTS = {
    "contiguous": torch.Tensor.contiguous,
    "token major": token_major,
    "cut from a wider tensor": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every second token": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "one key head for all": lambda t: t[:, :1].expand(t.shape),
}


def operator_arguments(backend, mask, dropout_p, layout="contiguous", **options):
    qkv = [LAYOUTS[layout](t) for t in small(requires_grad=False, **options)]
    seed = torch.tensor([3]) if dropout_p else None
    key = "" if mask is None else mask.key
    options = None, dropout_p, False, backend, "", False, False
    return *qkv, (key, None, None, seed, None, None, *options)


CALLS = [  # mask, dropout_p, layout, head dim of v
    (None, 0.3, "contiguous", 8),
    (MASK, 0.0, "cut from a wider tensor", 8),
    (MASK, 0.0, "every second token", 8),
    (MASK, 0.0, "one key head for all", 8),
    (MASK, 0.3, "token major", 12),
]
# the graphs of a call are those of others, whatever its layout: they take most of the time
QUICK = "test_schema", "test_autograd_registration", "test_faketensor"
ALL = *QUICK, "test_aot_dispatch_dynamic"
CHECKED = [  # backend, call, tests
    ("cpu", 0, ALL), ("reference", 1, QUICK), ("cpu", 3, QUICK), ("triton", 4, QUICK),
]  # fmt: skip
calls = pytest.mark.parametrize(
    "backend, mask, dropout_p, layout, v_head_dim, tests",
    [(b, *CALLS[i], tests) for b, i, tests in CHECKED if b in BACKENDS],
)


@calls
def test_opcheck(backend, mask, dropout_p, layout, v_head_dim, tests):
    """With a gradient of the LSE for every other layout."""
    *qkv, rest = operator_arguments(backend, mask, dropout_p, layout, v_head_dim=v_head_dim)
    out, lse, _ = torch.ops.sparseflash.forward(*qkv, *rest)
    lse_gradient = list(LAYOUTS).index(layout) % 2
    cotangents = torch.ones_like(out), torch.ones_like(lse) if lse_gradient else None
    for operator, tensors in (
        (torch.ops.sparseflash.forward, detached(qkv)),
        (torch.ops.sparseflash.inference, qkv),
        (torch.ops.sparseflash.backward, (*cotangents, *qkv, out, lse)),
    ):
        torch.library.opcheck(operator.default, (*tensors, *rest), test_utils=tests)


# ---- autocast


@two_backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_computes_in_the_low_precision(backend, dtype):
    qkv = small()
    with torch.autocast("cpu", dtype):
        out, lse = attend(*qkv, backend, return_lse=True)
    direct = attend(*(t.to(dtype) for t in qkv), backend)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, direct)
    assert relative_error(out, exact(*qkv)[0]) < 2 * torch.finfo(dtype).eps
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in qkv)


def test_autocast_takes_inputs_of_several_dtypes_and_leaves_float64_alone():
    q, k, v = small()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sparseflash.attention(q.bfloat16(), k, v)
        assert torch.equal(mixed, sparseflash.attention(q, k, v))
        assert sparseflash.attention(*small(dtype=torch.float64)).dtype == torch.float64


# ---- autograd


@pytest.mark.parametrize(
    "mask, dropout_p, return_lse, backend",
    [
        (None, 0.0, True, "cpu"),
        (masks.causal(), 0.3, True, "cpu"),
        (masks.causal(), 0.3, True, "reference"),
        (masks.local(1) & ~masks.global_tokens(2), 0.0, False, "cpu"),  # has empty rows
    ],
)
def test_gradients_are_those_of_finite_differences(mask, dropout_p, return_lse, backend):
    qkv = make_qkv(1, 2, 5, 5, 3, kv_heads=1, dtype=torch.float64, requires_grad=True)
    options = {"dropout_p": dropout_p, "seed": 1, "return_lse": return_lse, "scale": 0.7}
    function = partial(attend, backend=backend, mask=mask, **options)
    assert torch.autograd.gradcheck(function, qkv)


@backends
def test_last_stride_other_than_one_gives_the_same(backend):
    strided = [t.detach().mT.contiguous().mT for t in small()]
    expanded = [t.detach()[..., :1].expand(t.shape) for t in small()]
    for qkv in (strided, expanded):
        assert all(t.stride(-1) != 1 for t in qkv)
        expected = run(attend, [t.contiguous() for t in qkv], backend)
        assert_same(run(attend, qkv, backend), expected, 0.0)


@backends
def test_gradient_of_a_sum_takes_an_expanded_cotangent(backend):
    strided, plain = small(), small()
    out, lse = attend(*strided, backend, return_lse=True)
    (out.sum() + lse.sum()).backward()
    results = attend(*plain, backend, return_lse=True)
    torch.autograd.backward(results, [torch.ones_like(t) for t in results])
    for a, e in zip(strided, plain, strict=True):
        assert e.grad.abs().max() > 0
        assert torch.equal(a.grad, e.grad)


def test_one_input_may_require_a_gradient():
    everything = small()
    attend(*everything, "cpu").square().sum().backward()
    for which in range(3):
        qkv = [t.detach().requires_grad_(i == which) for i, t in enumerate(small())]
        attend(*qkv, "cpu").square().sum().backward()
        for i, (a, e) in enumerate(zip(qkv, everything, strict=True)):
            assert torch.equal(a.grad, e.grad) if i == which else a.grad is None


@backends
@pytest.mark.parametrize("weight_of_out", [False, True])
def test_lse_has_a_gradient(weight_of_out, backend):
    qkv, wide = small(), small(dtype=torch.float64)

    def gradients(out, lse, inputs):
        loss = (lse * torch.linspace(-1, 2, 40, dtype=lse.dtype)).sum()
        if weight_of_out:  # else nothing may depend on v
            loss = loss + out.square().sum()
        return lse, *torch.autograd.grad(loss, inputs, materialize_grads=True)

    actual = attend(*qkv, backend, return_lse=True)
    pairs = zip(gradients(*actual, qkv), gradients(*exact(*wide), wide), strict=True)
    for name, (a, e) in zip(("lse", "dq", "dk", "dv"), pairs, strict=True):
        assert_close(a, e, name=name)


def test_second_derivatives_are_refused():
    qkv = small()
    loss = sparseflash.attention(*qkv).square().sum()
    (dq,) = torch.autograd.grad(loss, qkv[:1], create_graph=True)
    with pytest.raises(RuntimeError, match="sparseflash"):
        dq.sum().backward()


# ---- the eager path and the operators


@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("mask, dropout_p", [(None, 0.0), (MASK, 0.3)])
def test_operator_and_eager_path_are_the_same_bits(mask, dropout_p, lse_gradient, monkeypatch):
    options = {"dropout_p": dropout_p, "seed": 3, "return_lse": True}

    def results():
        qkv = small()
        out, lse = attend(*qkv, mask=mask, **options)
        loss = out.square().sum() + (lse.sum() if lse_gradient else 0)
        return out, lse, *torch.autograd.grad(loss, qkv)

    eager = results()
    for module in (ops, import_module("sparseflash.attention")):
        monkeypatch.setattr(module, "plain", lambda *tensors: False)
    assert all(torch.equal(a, b) for a, b in zip(eager, results(), strict=True))


@pytest.mark.parametrize("call", [attend, lambda *qkv: plan(MASK, *qkv)])
def test_torch_can_ask_for_deterministic_gradients(call, monkeypatch):
    """Set as a whole with torch.use_deterministic_algorithms, in place of the argument."""
    for asked in (True, False):
        monkeypatch.setattr("torch.are_deterministic_algorithms_enabled", lambda asked=asked: asked)
        call(*small())
        assert plans()[-1].problem.options.deterministic is asked


def test_a_traced_call_is_as_deterministic_as_torch():
    seen = []

    def noted(graph, inputs):
        for node in graph.graph.nodes:
            if "sparseflash" in str(node.target):
                names = [argument.name for argument in node.target.default._schema.arguments]
                seen.append(node.args[names.index("deterministic")])
        return graph.forward

    def call(qkv):
        return attend(*(t.transpose(1, 2) for t in qkv.split(2, dim=2)))

    compiled = torch.compile(call, backend=noted, fullgraph=True)
    qkv = torch.randn(1, small()[0].shape[2], 6, 8, requires_grad=True)
    compiled(qkv)
    torch.use_deterministic_algorithms(True)
    try:
        compiled(qkv)
    finally:
        torch.use_deterministic_algorithms(False)
    assert seen == [False, True]


def test_tensor_subclass_meets_the_operator():
    class Wrapped(torch.Tensor):
        pass

    q, k, v = small(requires_grad=False)
    expected = attend(q, k, v)
    for _ in range(2):  # also once its plan is known
        out = attend(q.as_subclass(Wrapped), k, v)
        assert type(out) is Wrapped
        assert torch.equal(out.as_subclass(torch.Tensor), expected)
    q.requires_grad_()
    of_lse = (attend(x, k, v, return_lse=True)[1].sum() for x in (q.as_subclass(Wrapped), q))
    found, expected = (torch.autograd.grad(loss, q)[0] for loss in of_lse)
    assert torch.equal(found, expected)


def test_checkpointed_attention_has_the_same_gradients():
    checkpointed = partial(torch.utils.checkpoint.checkpoint, attend, use_reentrant=False)
    assert_same(run(checkpointed, small()), run(attend, small()), 0.0)


def test_flops_of_an_array_that_only_the_call_has():
    totals = []
    for give in (torch.Tensor.clone, masks.mask_from):
        mask = give(torch.rand(40, 40) < 0.5)
        with FlopCounterMode(display=False) as counter:
            attend(*small(), mask=mask).sum().backward()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] > 0


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_hooks_may_lay_out_anew_what_is_saved(layout, monkeypatch):
    """A backward meets the strides that it was planned for: repeated launches have no others."""
    qkv = [layout(t.detach()) for t in small(kv_heads=2)]
    expected, backward = run(attend, qkv), Plan.backward

    def checked(plan, dout, dlse, saved, schedule):
        assert tuple(t.stride() for t in saved[:3]) == plan.problem[3:6]
        return backward(plan, dout, dlse, saved, schedule)

    monkeypatch.setattr(Plan, "backward", checked)
    pack = partial(torch.clone, memory_format=torch.contiguous_format)  # as pinned memory is
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        assert_same(run(attend, qkv), expected, 0.0)


B, H, N, D, DV = 2, 4, 512, 16, 8
WINDOW = masks.local(128) >> masks.snap(128)


def counted(mask, *, backward: bool) -> int:
    qkv = make_qkv(B, H, N, N, D, kv_heads=2, v_head_dim=DV, requires_grad=True)
    if isinstance(mask, select.Selector):
        mask = mask(*qkv[:2])
    elif mask == "plan":
        mask = plan(WINDOW, *qkv, backend="cpu")
    out = attention(*qkv, mask, backend="cpu")  # a forward that it does not see
    with FlopCounterMode(display=False) as counter:
        out = out if backward else attention(*qkv, mask, backend="cpu")
        if backward:
            out.sum().backward()
    return counter.get_total_flops()


@pytest.mark.parametrize(
    "mask, blocks",
    [
        (None, 16),
        (WINDOW, 10),
        (WINDOW.build(N), 10),
        ("plan", 10),
        (masks.heads(WINDOW, masks.dense()), 13),
        (select.top_k(2, block_size=128), 8),
    ],
)
def test_flops_are_those_of_the_computed_blocks(mask, blocks):
    pairs = 2 * B * H * blocks * 128 * 128
    assert counted(mask, backward=False) == pairs * (D + DV)
    assert counted(mask, backward=True) == pairs * (3 * D + 2 * DV)
