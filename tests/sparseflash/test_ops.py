"""The operators as torch sees them, and `attention` under compile, autocast and autograd."""

import shutil

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode

import masks
import sparseflash
from sparseflash import ops, schedule
from sparseflash.attention import _prepare
from sparseflash.dropout import keep_mask
from sparseflash.testing import assert_close, make_qkv, oracle, relative_error

# without a GPU the conftest puts the Triton kernels into the interpreter
BACKENDS = ("reference", "cpu") if torch.cuda.is_available() else ("reference", "cpu", "triton")
MASK = (masks.local(9) | masks.butterfly(16)) & masks.causal()
COMPILERS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=pytest.mark.skipif(
            not (shutil.which("g++") or shutil.which("clang++")), reason="needs a C++ compiler"
        ),
    ),
]


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def small(length=40, **options):
    options = {"kv_heads": 1, "requires_grad": True} | options
    return make_qkv(2, 2, length, length, 8, **options)


def detached(tensors):
    return [t.detach().requires_grad_() for t in tensors]


def run(function, qkv, *rest):
    """Output and gradients, with a cotangent that is not constant."""
    qkv = detached(qkv)
    out = function(*qkv, *rest)
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return out.detach(), *torch.autograd.grad((out * weight).sum(), qkv)


def assert_same(actual, expected, tolerance=1e-6):
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert a.dtype == e.dtype
        error = relative_error(a, e)
        assert error <= tolerance, f"{name}: {error:.3g}"


# ---- opcheck


WIDE_VALUES = "token major, another head dim of v"
LAYOUTS = {
    "contiguous": lambda t: t,
    "token major": lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    WIDE_VALUES: lambda t: t.transpose(1, 2).contiguous().transpose(1, 2),
    "cut from a wider tensor": lambda t: torch.cat([t, t], -1)[..., : t.shape[-1]],
    "every second token": lambda t: t.repeat_interleave(2, dim=2)[:, :, ::2],
    "one key head for all": lambda t: t[:, :1].expand(t.shape),
}


def operator_arguments(backend, mask, dropout_p, layout="contiguous", dtype=torch.float32):
    qkv = small(requires_grad=False, dtype=dtype, v_head_dim=12 if layout == WIDE_VALUES else None)
    qkv = [LAYOUTS[layout](t) for t in qkv]
    seed = 3 if dropout_p else None
    q, k, v, blocks, *rest = _prepare(*qkv, mask, None, dropout_p, seed, backend)
    return (q, k, v, *ops._flat(blocks), *rest, False, backend)


CALLS = [
    (None, 0.0, "contiguous"),
    (MASK, 0.0, "contiguous"),
    (None, 0.3, "contiguous"),
    (MASK, 0.3, "token major"),
    (MASK, 0.0, "cut from a wider tensor"),
    (MASK, 0.0, "every second token"),
    (MASK, 0.0, "one key head for all"),
    (MASK, 0.3, WIDE_VALUES),
]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("mask, dropout_p, layout", CALLS)
def test_opcheck_accepts_forward(mask, dropout_p, layout, backend):
    arguments = operator_arguments(backend, mask, dropout_p, layout)
    arguments = (*detached(arguments[:3]), *arguments[3:])
    torch.library.opcheck(torch.ops.sparseflash.forward.default, arguments)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("mask, dropout_p, layout", CALLS)
def test_opcheck_accepts_backward(mask, dropout_p, layout, lse_gradient, backend):
    arguments = operator_arguments(backend, mask, dropout_p, layout)
    out, lse = torch.ops.sparseflash.forward(*arguments)
    dout, dlse = torch.ones_like(out), torch.ones_like(lse) if lse_gradient else None
    torch.library.opcheck(
        torch.ops.sparseflash.backward.default,
        (dout, dlse, *arguments[:3], out, lse, *arguments[3:]),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_fake_results_have_the_dtypes_and_strides_of_real_ones(backend, dtype):
    arguments = operator_arguments(backend, MASK, 0.0, "token major", dtype)
    torch.library.opcheck(
        torch.ops.sparseflash.forward.default, arguments, test_utils="test_faketensor"
    )


# ---- torch.compile


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


# ---- autocast


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("backend", ["reference", "cpu"])
def test_autocast_computes_in_the_low_precision(backend, dtype):
    qkv = small()
    with torch.autocast("cpu", dtype):
        out, lse = sparseflash.attention(*qkv, MASK, backend=backend, return_lse=True)
    direct = sparseflash.attention(*(t.to(dtype) for t in qkv), MASK, backend=backend)
    assert out.dtype == dtype and lse.dtype == torch.float32
    assert torch.equal(out, direct)
    dense = torch.from_numpy(MASK.build(40).to_dense())
    assert relative_error(out, oracle(*qkv, dense)[0]) < 2 * torch.finfo(dtype).eps
    out.float().square().sum().backward()
    assert all(t.grad.dtype == torch.float32 for t in qkv)


def test_backends_agree_under_autocast():
    results = []
    for backend in ("reference", "cpu"):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(
                run(lambda *a, b=backend: sparseflash.attention(*a, MASK, backend=b), small())
            )
    assert_same(*results, tolerance=torch.finfo(torch.bfloat16).eps)


def test_autocast_takes_inputs_of_several_dtypes():
    q, k, v = small()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = sparseflash.attention(q.bfloat16(), k, v)
        assert torch.equal(mixed, sparseflash.attention(q, k, v))


def test_autocast_leaves_float64_alone():
    with torch.autocast("cpu", torch.bfloat16):
        assert sparseflash.attention(*small(dtype=torch.float64)).dtype == torch.float64


# ---- autograd


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize(
    "mask, dropout_p, return_lse",
    [
        (None, 0.0, True),
        (masks.causal(), 0.0, True),
        (masks.causal(), 0.3, True),
        (masks.local(1) & ~masks.global_tokens(2), 0.0, False),  # has empty rows
    ],
)
def test_gradients_are_those_of_finite_differences(mask, dropout_p, return_lse, backend):
    qkv = make_qkv(1, 2, 5, 5, 3, kv_heads=1, dtype=torch.float64, requires_grad=True)

    def function(q, k, v):
        options = {"dropout_p": dropout_p, "seed": 1, "return_lse": return_lse}
        return sparseflash.attention(q, k, v, mask, backend=backend, scale=0.7, **options)

    assert torch.autograd.gradcheck(function, qkv)


@pytest.mark.parametrize("backend", BACKENDS)
def test_last_stride_other_than_one_gives_the_same(backend):
    def function(q, k, v):
        return sparseflash.attention(q, k, v, MASK, backend=backend)

    expected = run(function, small())
    strided = [t.detach().mT.contiguous().mT for t in small()]
    assert all(t.stride(-1) != 1 for t in strided)
    assert_same(run(function, strided), expected, 0.0)
    expanded = [t.detach()[..., :1].expand(t.shape) for t in small()]
    assert all(t.stride(-1) == 0 for t in expanded)
    assert_same(run(function, expanded), run(function, [t.contiguous() for t in expanded]), 0.0)


@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_of_a_sum_takes_an_expanded_cotangent(backend):
    strided, plain = small(), small()
    for qkv, expand in ((strided, True), (plain, False)):
        out, lse = sparseflash.attention(*qkv, MASK, backend=backend, return_lse=True)
        if expand:
            (out.sum() + lse.sum()).backward()
        else:
            torch.autograd.backward((out, lse), (torch.ones_like(out), torch.ones_like(lse)))
    for a, e in zip(strided, plain, strict=True):
        assert e.grad.abs().max() > 0
        assert torch.equal(a.grad, e.grad)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("which", range(3), ids="qkv")
def test_one_input_may_require_a_gradient(which, backend):
    qkv = [t.detach().requires_grad_(i == which) for i, t in enumerate(small())]
    sparseflash.attention(*qkv, MASK, backend=backend).square().sum().backward()
    everything = small()
    sparseflash.attention(*everything, MASK, backend=backend).square().sum().backward()
    for i, (a, e) in enumerate(zip(qkv, everything, strict=True)):
        assert torch.equal(a.grad, e.grad) if i == which else a.grad is None


def test_no_input_needs_a_gradient():
    out, lse = sparseflash.attention(*small(requires_grad=False), MASK, return_lse=True)
    assert not out.requires_grad and not lse.requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("weight_of_out", [0, 1])
def test_lse_has_a_gradient(weight_of_out, backend):
    qkv, wide = small(), small(dtype=torch.float64)
    dense = torch.from_numpy(MASK.build(40).to_dense())

    def gradients(out, lse, inputs):
        loss = (lse * torch.linspace(-1, 2, 40, dtype=lse.dtype)).sum()
        loss = loss + weight_of_out * out.square().sum() if weight_of_out else loss
        return torch.autograd.grad(loss, inputs, allow_unused=True)

    actual = sparseflash.attention(*qkv, MASK, backend=backend, return_lse=True)
    expected = oracle(*wide, dense)
    assert_close(actual[1], expected[1], name="lse")
    for name, a, e in zip(
        ("dq", "dk", "dv"), gradients(*actual, qkv), gradients(*expected, wide), strict=True
    ):
        assert_close(a, torch.zeros_like(a) if e is None else e, name=name)


def test_second_derivatives_are_refused():
    qkv = small()
    (dq,) = torch.autograd.grad(
        sparseflash.attention(*qkv).square().sum(), qkv[:1], create_graph=True
    )
    with pytest.raises(RuntimeError, match="sparseflash"):
        dq.sum().backward()


# ---- the eager path and the operators


@pytest.mark.parametrize("lse_gradient", [False, True])
@pytest.mark.parametrize("mask, dropout_p", [(None, 0.0), (MASK, 0.3)])
def test_operator_and_eager_path_are_the_same_bits(mask, dropout_p, lse_gradient, monkeypatch):
    def results():
        q, k, v = small()
        out, lse = sparseflash.attention(
            q, k, v, mask, dropout_p=dropout_p, seed=3, return_lse=True
        )
        loss = out.square().sum() + (lse.sum() if lse_gradient else 0)
        return out, lse, *torch.autograd.grad(loss, (q, k, v))

    eager = results()
    monkeypatch.setattr(ops, "only_autograd_looks_on", lambda *tensors: False)
    for a, b in zip(eager, results(), strict=True):
        assert torch.equal(a, b)


def test_dispatch_mode_sees_the_operators():
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    with Recorder():
        sparseflash.attention(*small(), MASK).sum().backward()
    assert {"sparseflash.forward.default", "sparseflash.backward.default"} <= set(seen)


def test_tensor_subclass_meets_the_operator():
    class Wrapped(torch.Tensor):
        pass

    q, k, v = small(requires_grad=False)
    out = sparseflash.attention(q.as_subclass(Wrapped), k, v, MASK)
    assert type(out) is Wrapped
    assert torch.equal(out.as_subclass(torch.Tensor), sparseflash.attention(q, k, v, MASK))


def test_checkpointed_attention_has_the_same_gradients():
    def function(q, k, v):
        return sparseflash.attention(q, k, v, MASK)

    def checkpointed(q, k, v):
        return torch.utils.checkpoint.checkpoint(function, q, k, v, use_reentrant=False)

    assert_same(run(checkpointed, small()), run(function, small()), 0.0)


# ---- v with a head dim of its own


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("v_head_dim", [1, 4, 20])
@pytest.mark.parametrize("backend", BACKENDS)
def test_head_dim_of_v_may_differ(backend, v_head_dim, token_major):
    qkv = small(v_head_dim=v_head_dim)
    if token_major:
        qkv = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
    dense = torch.from_numpy(MASK.build(40).to_dense())
    actual = run(lambda *a: sparseflash.attention(*a, MASK, backend=backend), qkv)
    assert actual[0].shape == (2, 2, 40, v_head_dim)
    expected = run(lambda *a: oracle(*a, dense)[0], [t.double() for t in qkv])
    for name, a, e in zip(("out", "dq", "dk", "dv"), actual, expected, strict=True):
        assert_close(a, e, name=name)


def test_scale_follows_the_head_dim_of_q():
    q, k, v = small(v_head_dim=20)
    assert torch.equal(
        sparseflash.attention(q, k, v), sparseflash.attention(q, k, v, scale=8**-0.5)
    )


def test_compiled_attention_with_another_head_dim_of_v_equals_eager(fresh_dynamo):
    compiled = torch.compile(sparseflash.attention, fullgraph=True, backend="aot_eager")
    qkv = small(v_head_dim=12)
    assert_same(run(compiled, qkv, MASK), run(sparseflash.attention, qkv, MASK))


# ---- the forms of a mask


def forms_of(mask):
    array = mask.build(40).to_dense()[0, 0]
    yield "Mask", mask
    yield "BlockMask", mask.build(40)
    yield "numpy array", array
    yield "torch tensor", torch.from_numpy(array)
    yield "tensor with batch and heads", torch.from_numpy(array).expand(2, 2, 40, 40)
    yield "strided array", np.asfortranarray(array)
    yield "mask_from", masks.mask_from(array)
    yield "parsed text", masks.parse(str(mask))


@pytest.mark.parametrize("form", range(8))
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_form_of_a_mask_gives_the_same(form, backend):
    name, given = list(forms_of(MASK))[form]

    def function(q, k, v, mask):
        return sparseflash.attention(q, k, v, mask, backend=backend)

    error = [
        relative_error(a, e)
        for a, e in zip(run(function, small(), given), run(function, small(), MASK), strict=True)
    ]
    assert max(error) < 1e-6, name


def test_block_size_of_a_block_mask_does_not_change_the_result():
    for size in (16, (32, 48), (256, 16)):
        expected = run(sparseflash.attention, small(), MASK)
        assert_same(run(sparseflash.attention, small(), MASK.build(40, block_size=size)), expected)


def test_mask_per_head_and_per_batch_reaches_its_slice():
    array = np.random.default_rng(0).random((2, 2, 40, 40)) < 0.5
    q, k, v = small()
    whole = sparseflash.attention(q, k, v, array)
    for b in range(2):
        for h in range(2):
            one = (q[b : b + 1, h : h + 1], k[b : b + 1], v[b : b + 1])
            alone = sparseflash.attention(*one, array[b, h])
            assert relative_error(whole[b, h], alone[0, 0]) < 1e-6


@pytest.mark.parametrize("form", range(8))
def test_second_call_does_not_rebuild_the_schedule(form, monkeypatch):
    built = []
    to_device = schedule._to_device
    monkeypatch.setattr(schedule, "_cache", schedule.Cache(8, 2**20))
    monkeypatch.setattr(schedule, "_to_device", lambda *a: built.append(1) or to_device(*a))
    _, mask = list(forms_of(MASK))[form]
    for _ in range(2):
        sparseflash.attention(*small(), mask)
    assert len(built) == 1
    sparseflash.attention(*small(33), MASK)
    assert len(built) == 2


# ---- dropout


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_keeps_the_share_that_it_should(backend):
    # with equal scores and v the identity, out holds the probabilities themselves
    batch, heads, n_q, n_k, p = 1, 4, 256, 64, 0.3
    q, k = torch.zeros(batch, heads, n_q, n_k), torch.zeros(batch, heads, n_k, n_k)
    v = torch.eye(n_k).expand(batch, heads, n_k, n_k)
    out = sparseflash.attention(q, k, v, dropout_p=p, seed=11, backend=backend)
    kept = out > 0
    deviation = (p * (1 - p) / kept.numel()) ** 0.5
    assert abs(kept.double().mean().item() - (1 - p)) < 5 * deviation
    torch.testing.assert_close(out[kept], torch.full_like(out[kept], 1 / (n_k * (1 - p))))
    assert torch.equal(kept, keep_mask(torch.tensor([11]), batch, heads, n_q, n_k, p))


def test_dropout_is_the_same_on_every_backend():
    results = [
        run(
            lambda *a, b=backend: sparseflash.attention(
                *a, MASK, dropout_p=0.4, seed=2**40 + 7, backend=b
            ),
            small(),
        )
        for backend in BACKENDS
    ]
    for result in results[1:]:
        assert_same(result, results[0], 1e-5)


def test_seed_may_be_int_or_tensor():
    def out(seed):
        return sparseflash.attention(*small(), dropout_p=0.5, seed=seed)

    for seed in (torch.tensor(9), torch.tensor([9]), torch.tensor([[9]])):
        assert torch.equal(out(9), out(seed))
    assert not torch.equal(out(9), out(10))
    assert not torch.equal(out(9), out(9 + 2**40))


def test_seed_none_is_drawn_from_the_generator_of_torch():
    def out():
        return sparseflash.attention(*small(), dropout_p=0.5)

    torch.manual_seed(4)
    first, second = out(), out()
    torch.manual_seed(4)
    assert torch.equal(first, out()) and torch.equal(second, out())
    assert not torch.equal(first, second)


def test_call_without_dropout_leaves_the_generator_alone():
    before = torch.get_rng_state()
    sparseflash.attention(*small(), MASK)
    assert torch.equal(before, torch.get_rng_state())
