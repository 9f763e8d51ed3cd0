"""The attention module and rotary embeddings against plain torch in float64."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import masks
from sparseflash import BlockSparseAttention, Rotary, select
from sparseflash.testing import oracle

DIM, HEADS, N = 24, 4, 40
CPU = {"backend": "cpu"}  # the interpreter of Triton would be slow


def make(dtype=torch.float64, **options) -> BlockSparseAttention:
    torch.manual_seed(0)
    return BlockSparseAttention(DIM, HEADS, **CPU, **options).to(dtype)


def tokens(n: int = N, batch: int = 2, seed: int = 1, dtype=torch.float64) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, n, DIM, generator=generator, dtype=dtype)


def expected(layer, x, context=None, allowed=None, turn=lambda t: t):
    """The layer in plain torch; turn: of queries and keys (B, N, heads, head_dim)."""
    context = x if context is None else context
    projections = (layer.q, x), (layer.k, context), (layer.v, context)
    q, k, v = (
        F.linear(t, p.weight, p.bias).unflatten(2, (-1, layer.head_dim)) for p, t in projections
    )
    q, k, v = (t.transpose(1, 2) for t in (turn(q), turn(k), v))
    out, _ = oracle(q, k, v, allowed)
    return layer.out(out.transpose(1, 2).flatten(2))


def dense(mask, n_q: int = N, n_k: int | None = None) -> torch.Tensor:
    heads = HEADS if mask.per_head else None
    return torch.from_numpy(mask.build(n_q, n_k, heads=heads).to_dense())


def gradients_of(layer, out, *inputs):
    return torch.autograd.grad(out.square().sum(), [*inputs, *layer.parameters()])


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"kv_heads": 2, "bias": False},
        {"kv_heads": 1, "head_dim": 10},
        {"mask": masks.local(7) | masks.global_tokens(2)},
        {"mask": masks.heads(masks.local(3), masks.causal(), masks.dense(), masks.local(9))},
    ],
)
def test_it_is_attention_between_projections(options):
    layer, x = make(**options), tokens().requires_grad_()
    allowed = None if layer.mask is None else dense(layer.mask)
    found, wanted = layer(x), expected(layer, x, allowed=allowed)
    assert found.shape == x.shape
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-10)
    gradients = gradients_of(layer, found, x), gradients_of(layer, wanted, x)
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
def test_cross_attention(bias):
    layer = make(kv_heads=2, bias=bias, rotary=Rotary(100.0))
    x, context = tokens(), tokens(29, seed=2)
    wanted = expected(layer, x, context, turn=lambda t: by_complex_numbers(t, 100.0))
    torch.testing.assert_close(layer(x, context=context), wanted)
    masked = make(mask=masks.causal(align="bottom_right"))
    wanted = expected(masked, x, context, allowed=dense(masked.mask, N, 29))
    torch.testing.assert_close(masked(x, context=context), wanted)


def by_complex_numbers(x: torch.Tensor, base: float, fraction: float = 1.0) -> torch.Tensor:
    """The definition: a pair of features is a complex number, multiplied by exp(i angle)."""
    turned = round(fraction * x.shape[-1])
    half = turned // 2
    frequency = torch.tensor([base ** (-2 * i / turned) for i in range(half)], dtype=torch.float64)
    angle = torch.arange(x.shape[1], dtype=torch.float64)[:, None, None] * frequency
    pairs = torch.complex(x[..., :half], x[..., half:turned])
    pairs = pairs * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([pairs.real, pairs.imag, x[..., turned:]], -1)


@pytest.mark.parametrize(
    "base, fraction, head_dim",  # 0.58 * 100 is a little less than 58
    [(10_000.0, 1.0, 16), (500.0, 0.5, 16), (10.0, 0.25, 16), (10.0, 0.58, 100)],
)
def test_rotary_is_its_definition(base, fraction, head_dim):
    x = torch.randn(2, 30, 3, head_dim, dtype=torch.float64)
    found = Rotary(base, fraction)(x)
    torch.testing.assert_close(found, by_complex_numbers(x, base, fraction))
    assert torch.equal(found[:, 0], x[:, 0])
    assert torch.equal(Rotary(base, fraction)(x[:, 7:], start=7), found[:, 7:])


@pytest.mark.usefixtures("fresh_dynamo")
def test_rotary_in_a_compiled_function():
    """The same values and gradients; the operator of its table passes torch's own checks."""
    rotary, x = Rotary(100.0, 0.5), torch.randn(2, 9, 3, 8, requires_grad=True)
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    (made,) = torch.autograd.grad(compiled(x).sin().sum(), x)
    (wanted,) = torch.autograd.grad(rotary(x).sin().sum(), x)
    torch.testing.assert_close(made, wanted)
    torch.testing.assert_close(compiled(x, 5), rotary(x, 5))
    given = 9, 8, 100.0, False, torch.device("cpu")
    torch.library.opcheck(torch.ops.sparseflash.rotary, given)


def test_rotary_in_a_layer():
    layer = make(rotary=Rotary(1000.0, 0.5), head_dim=8)
    wanted = expected(layer, tokens(), turn=lambda t: by_complex_numbers(t, 1000.0, 0.5))
    torch.testing.assert_close(layer(tokens()), wanted)
    assert set(layer.state_dict()) == set(make(head_dim=8).state_dict())


def test_masks_in_all_forms():
    mask = masks.local(7) | masks.global_tokens(2)
    x, wanted = tokens(), make(mask=mask)(tokens())
    for form in (str(mask), mask.build(N, block_size=16), dense(mask), dense(mask).numpy()):
        torch.testing.assert_close(make(mask=form)(x), wanted)
    layers = masks.layers(masks.dense(), mask)
    assert make(mask=layers, layer=1).mask == mask
    torch.testing.assert_close(make(mask=layers, layer=1)(x), wanted)
    every = select.top_k(1.0, block_size=16, within=mask)
    torch.testing.assert_close(make(mask=every)(x), wanted)
    few = make(mask=select.top_k(1, block_size=16))(x)
    assert not torch.allclose(few, make()(x))


def largest(layer, x, mask):
    """The largest logit of each head in float64."""
    q, k = (p(x).double().unflatten(2, (-1, layer.head_dim)) for p in (layer.q, layer.k))
    scores = torch.einsum("bqhd, bkhd -> bhqk", q, k) * layer.head_dim**-0.5
    return scores.masked_fill(~dense(mask), -torch.inf).amax((0, 2, 3))


@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("compiled", [False, True])
def test_max_scores_of_the_last_forward(compiled):
    """One number a head, without a gradient; neither output nor parameters change."""
    mask = masks.local(7) | masks.global_tokens(2)
    layer, plain = make(mask=mask, keep_max_scores=True), make(mask=mask)
    assert layer.max_scores is None and set(layer.state_dict()) == set(plain.state_dict())
    call = torch.compile(layer, backend="aot_eager", fullgraph=True) if compiled else layer
    for factor in (1, 3):
        x = tokens() * torch.tensor([1, factor]).view(-1, 1, 1)
        torch.testing.assert_close(call(x), plain(x))
        assert layer.max_scores.shape == (layer.heads,) and not layer.max_scores.requires_grad
        torch.testing.assert_close(layer.max_scores.double(), largest(layer, x, mask))
    plain(x)
    assert plain.max_scores is None


@pytest.mark.parametrize("padding", ["auto", "hide", "skip"])
def test_lengths(padding):
    ends = torch.tensor([256, 1, 130, 0])
    layer = make(mask=masks.local(50), padding=padding)
    x = tokens(256, batch=4)
    real = torch.arange(256) < ends[:, None]
    allowed = dense(masks.local(50), 256) & real[:, None, None] & real[:, None, :, None]
    wanted = expected(layer, x, allowed=allowed)
    for given in (ends, ends.tolist(), layer.plan(ends, 256)):
        found = layer(x, lengths=given)
        assert found.isfinite().all()
        torch.testing.assert_close(found[real], wanted[real])
    turned, plan = make(mask=masks.local(50), rotary=Rotary()), layer.plan(ends, 256)
    found, wanted = (turned(x, lengths=given) for given in (plan, ends))
    torch.testing.assert_close(found[real], wanted[real])
    cross = make(mask=None, padding="hide")
    keys = real[:, None, None, :90]
    found = cross(x[:, :30], context=x[:, :90], lengths=ends.clamp(max=90))
    torch.testing.assert_close(found, expected(cross, x[:, :30], x[:, :90], allowed=keys))


def test_max_scores_of_a_batch_that_vmap_maps():
    layer, x = make(keep_max_scores=True), tokens(batch=4)
    torch.testing.assert_close(torch.vmap(layer)(x.view(2, 2, N, DIM)).flatten(0, 1), layer(x))
    wanted = layer.max_scores
    torch.vmap(layer)(x.view(2, 2, N, DIM))
    torch.testing.assert_close(layer.max_scores, wanted)


def test_dropout_is_for_training():
    layer, x = make(dropout=0.5), tokens()
    torch.manual_seed(3)
    first, second = layer(x), layer(x)
    torch.manual_seed(3)
    assert torch.equal(layer(x), first) and not torch.equal(first, second)
    layer.eval()
    torch.testing.assert_close(layer(x), make()(x))


def test_its_state_is_that_of_four_linear_layers():
    layer = make(kv_heads=np.int64(2))
    shapes = {name: tuple(value.shape) for name, value in layer.state_dict().items()}
    assert shapes == {
        "q.weight": (24, 24), "q.bias": (24,), "k.weight": (12, 24), "k.bias": (12,),
        "v.weight": (12, 24), "v.bias": (12,), "out.weight": (24, 24), "out.bias": (24,)
    }  # fmt: skip
    on_meta = BlockSparseAttention(DIM, HEADS, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in on_meta.parameters()} == {("meta", torch.float16)}
    other = BlockSparseAttention(DIM, HEADS, kv_heads=2, mask=masks.causal()).double()
    other.load_state_dict(layer.state_dict())
    x = tokens()
    assert torch.equal(copy.deepcopy(layer)(x), layer(x))


def test_autocast():
    layer, x = make(torch.float32, mask=masks.local(9), rotary=Rotary()), tokens()
    wanted = layer(x.float())
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x.float())
        plan = layer.plan(torch.tensor([100, 128]), 128)
        assert layer(tokens(128).float(), lengths=plan).dtype == torch.bfloat16
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.float(), wanted, rtol=0.05, atol=0.02)


def test_autocast_with_features_that_a_module_turns_wide():
    class Wide(torch.nn.Module):
        forward = staticmethod(torch.Tensor.float)

    layer, x, lengths = make(torch.float32, rotary=Wide()), tokens().float(), [N, 17]
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(x, lengths=lengths)
    torch.testing.assert_close(
        found[1, :17].float(), layer(x, lengths=lengths)[1, :17], rtol=0.05, atol=0.02
    )


def test_it_compiles_into_one_graph(fresh_dynamo):
    layer = make(torch.float32, mask=masks.local(9), rotary=Rotary(), kv_heads=2)
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    x, lengths = tokens(dtype=torch.float32).requires_grad_(), torch.tensor([N, 17])
    found, wanted = compiled(x, lengths=lengths), layer(x, lengths=lengths)
    torch.testing.assert_close(found, wanted)
    gradients = gradients_of(layer, found), gradients_of(layer, wanted)
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-4)


REFUSED = [
    ({"heads": 5}, "dim is 24, .* heads, 5"),
    ({"kv_heads": 3}, "kv_heads is 3; it must divide heads, 4"),
    ({"dropout": 1.0}, r"dropout is 1.0; it must be a number in \[0, 1\)"),
    ({"padding": "keep"}, "padding is 'keep'; choose one of"),
    ({"rotary": True}, r"rotary is True; pass a module such as Rotary\(\)"),
    ({"mask": [masks.causal()] * 4}, r"mask is a list; .* \(masks.heads makes one mask"),
    ({"mask": "layers(local(3), dense())"}, r"differs from layer to layer; pass layer="),
    ({"mask": "local(3)", "layer": -1}, "layer is -1: give an integer >= 0"),
]


@pytest.mark.parametrize("options, message", REFUSED)
def test_arguments_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        BlockSparseAttention(**{"dim": DIM, "heads": HEADS} | options)


LAYER, OF_BLOCKS, X = make(), make(mask=masks.local(3).build(128)), tokens()
PICKED, CHOOSING = select.top_k(1)(X[:, None], X[:, None]), make(mask=select.top_k(1))


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda: LAYER(X[0]), r"x has shape \(40, 24\); it must be \(batch, N, 24\)"),
        (lambda: LAYER(X.tolist()), "x is a list; pass a torch tensor"),
        (lambda: LAYER(X, context=X[:1]), r"context has shape .* must be \(2, N, 24\)"),
        (lambda: LAYER(X, lengths=[1]), "one for each sequence"),
        (lambda: make(padding="skip")(X, lengths=[1, 2]), "padding is skip.* 40 queries"),
        (lambda: LAYER.plan([], 128), r"lengths is \[\]; give that of one sequence"),
        (lambda: CHOOSING.plan(PICKED, N), r"the mask is top_k\(1\), .* pass ints"),
        (lambda: CHOOSING(X, lengths=LAYER.plan([3, 4], 128)), r"top_k\(1\), .* pass ints"),
        (lambda: LAYER.plan([3, 4], 100), "with 100 queries"),
        (lambda: OF_BLOCKS.plan([3], 100), "None, a Mask or a BlockMask.* multiple of 128"),
        (lambda: Rotary(base=1.0), "base is 1.0"),
        (lambda: Rotary(fraction=0), "fraction is 0"),
        (lambda: Rotary(fraction=0.5)(torch.ones(1, 2, 1, 6)), "turns 3 of 6 features"),
        (lambda: Rotary()(X[:, :, None], positions=torch.ones(1)), r"positions .*\(1,\), x 40"),
        (lambda: Rotary()(torch.ones(4, 4, 6)), r"x is torch.float32 of shape \(4, 4, 6\); pass"),
    ],
)
def test_inputs_are_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
