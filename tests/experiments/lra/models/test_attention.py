"""Every attention against a dense float64 oracle of its definition, and what all must keep."""

from itertools import product

import pytest
import torch
from torch import Tensor

import masks
from experiments.lra.models.attention import NAMES, Attention, make_attention
from experiments.lra.models.attention.base import budget
from experiments.lra.models.attention.flash import default_block
from experiments.lra.models.attention.hashing import Reformer, Smyrf

B, H, N, D = 2, 3, 75, 12  # 75 divides by no window, bucket or cluster of the tests
OPTIONS = {  # the interpreter of Triton would be slow
    "flash": {"backend": "cpu"},
    "sparse": {"mask": "local:20+global:5", "backend": "cpu"},
    "linformer": {"rank": 9},
    "performer": {"features": 14},
    "local": {"window": 16},
    "reformer": {"bucket": 16},
    "smyrf": {"cluster": 16},
}
FORMS = [  # every attention, and what the Nystromformer port and google's code have instead
    *((name, {}) for name in NAMES),
    ("linear", {"normalise": False}),
    ("linformer", {"shared": True}),
    ("linformer", {"same_kv": True}),
    ("reformer", {"scale": 1.0}),
    ("performer", {"scale": 1 / D}),
    ("performer", {"kernel": "relu", "features": None}),
]
LENGTHS = torch.tensor([75, 41], dtype=torch.int32)


def make(name: str, n: int = N, dtype: torch.dtype = torch.float64, **options) -> Attention:
    torch.manual_seed(1)
    options = {**OPTIONS.get(name, {}), **options}
    attention = make_attention(name, heads=H, head_dim=D, length=n, **options)
    attention.redraw = False
    return attention.eval().to(dtype)


def inputs(name: str, n: int = N, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k and v as the encoder lays them out: views of one buffer with the tokens outermost."""
    torch.manual_seed(2)
    buffer = torch.randn(B, n, 3, H, D, dtype=dtype)
    q, k, v = (t.transpose(1, 2) for t in buffer.unbind(2))
    return [q, q if make(name).shared_qk else k, v]


# ---- the definition of every attention, dense and in float64, sequence by sequence


def softmax_oracle(q: Tensor, k: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    scores = (q @ k.mT * D**-0.5).masked_fill(~allowed, -torch.inf)
    return scores.softmax(-1).nan_to_num(0) @ v


def oracle(attention: Attention, name: str, q: Tensor, k: Tensor, v: Tensor, ends: Tensor):
    """The definition, sequence by sequence, of the real tokens alone."""
    outs = []
    for b, end in enumerate(ends.tolist()):
        qb, kb, vb = (t[b, :, :end] for t in (q, k, v))
        i, j = torch.arange(end)[:, None], torch.arange(end)
        allowed = {
            "standard": i == i,
            "flash": i == i,
            "sparse": ((i - j).abs() <= 20) | (i < 5) | (j < 5),
            "local": i // 16 == j // 16,
        }
        if name in allowed:
            out = softmax_oracle(qb, kb, vb, allowed[name])
        elif name == "linformer":
            both = [attention.project] * 2 if attention.shared else None
            for_k, for_v = both or (attention.project_k, attention.project_v)
            kb, vb = for_k[..., :end, :].mT @ kb, for_v[..., :end, :].mT @ vb
            out = softmax_oracle(qb, kb, vb, torch.ones(1, 9, dtype=torch.bool))
        elif name == "linear":
            weights = (torch.nn.functional.elu(qb) + 1) @ (torch.nn.functional.elu(kb) + 1).mT
            total = weights.sum(-1, keepdim=True) + 1e-6
            out = weights @ vb / (total if attention.normalise else N**0.5)
        elif name == "performer":
            out = performer_oracle(attention, qb, kb, vb)
        elif name == "reformer":
            out = torch.stack([reformer_oracle(attention, *x) for x in zip(qb, vb, strict=True)])
        else:
            heads = zip(qb, kb, vb, strict=True)
            out = torch.stack([smyrf_oracle(attention, *x) for x in heads])
        outs.append(out)
    return outs


def performer_oracle(attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    def features(x, axes):
        if attention.kernel == "relu":
            return x.clamp(min=0) + 1e-3
        x = x * attention.scale**0.5
        exponents = x @ attention.projection.T - x.square().sum(-1, keepdim=True) / 2
        return (exponents - exponents.detach().amax(axes, keepdim=True)).exp() + 1e-6

    weights = features(q, (-1,)) @ features(k, (-1, -2)).mT
    return weights @ v / weights.sum(-1, keepdim=True)


def reformer_oracle(attention, q: Tensor, v: Tensor) -> Tensor:
    """One head. Chunk 0 of a round looks back at the last chunk of the round before, padded."""
    n, size = len(q), attention.bucket
    chunks = -(-N // size)
    rotated = (q @ attention.rotations).view(n, attention.hashes, attention.halves)
    hashed = torch.cat([rotated, -rotated], -1).argmax(-1)
    in_chunks = []  # over all rounds
    for round_ in range(attention.hashes):
        order = sorted(range(n), key=lambda t: (hashed[t, round_].item(), t))
        in_chunks += [order[c * size : (c + 1) * size] for c in range(chunks)]
    k = torch.nn.functional.normalize(q, dim=-1)
    numerator, total = torch.zeros_like(v), torch.zeros(n, 1, dtype=v.dtype)
    for c, chunk in enumerate(in_chunks):
        keys = chunk + in_chunks[c - 1]
        if not chunk:
            continue
        scores = q[chunk] @ k[keys].mT * attention.scale
        scores[torch.tensor(chunk)[:, None] == torch.tensor(keys)] = -5e4
        p = scores.exp()
        numerator = numerator.index_add(0, torch.tensor(chunk), p @ v[keys])
        total = total.index_add(0, torch.tensor(chunk), p.sum(-1, keepdim=True))
    return numerator / total


def smyrf_oracle(attention, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    n, size = len(q), attention.cluster
    most = q.square().sum(-1).max() + k.square().sum(-1).max()
    zeros = torch.zeros(n, 1, dtype=q.dtype)
    fq = torch.cat([q, zeros, (most - q.square().sum(-1, keepdim=True)).sqrt()], 1)
    gk = torch.cat([k, (most - k.square().sum(-1, keepdim=True)).sqrt(), zeros], 1)
    assert torch.allclose(torch.cdist(fq, gk) ** 2, 2 * most - 2 * q @ k.T)
    numerator, total = torch.zeros_like(v), torch.zeros(n, 1, dtype=v.dtype)
    for a in attention.projections.T:
        rows, cols = (fq @ a).argsort(), (gk @ a).argsort()
        for at in range(0, n, size):
            queries, keys = rows[at : at + size], cols[at : at + size]
            p = (q[queries] @ k[keys].T * D**-0.5).exp()
            numerator = numerator.index_add(0, queries, p @ v[keys])
            total = total.index_add(0, queries, p.sum(-1, keepdim=True))
    return numerator / total


# ---- what all must keep


@pytest.mark.parametrize(("name", "options"), FORMS)
@pytest.mark.parametrize("padded", [False, True])
def test_it_is_its_definition_forward_and_backward(name, options, padded):
    """Of the real tokens alone: large values and no gradients are at those of padding."""
    attention, lengths = make(name, **options), LENGTHS if padded else None
    ends = LENGTHS if padded else torch.full((B,), N)
    padding = (torch.arange(N) >= ends[:, None])[:, None, :, None]
    leaves = [torch.where(padding, 30 * t, t).requires_grad_() for t in inputs(name)]
    q, v = leaves[0], leaves[2]
    k = q if attention.shared_qk else leaves[1]
    out = attention(q, k, v, lengths)
    expected = oracle(attention, name, q, k, v, ends)
    assert out.shape == (B, H, N, D) and out.isfinite().all()
    torch.manual_seed(3)
    got, wanted = 0, 0
    for ours, theirs, end in zip(out, expected, ends.tolist(), strict=True):
        torch.testing.assert_close(ours[:, :end], theirs, rtol=1e-9, atol=1e-10)
        weight = torch.randn_like(theirs)
        got, wanted = got + (ours[:, :end] * weight).sum(), wanted + (theirs * weight).sum()
    wrt = [q, v] if attention.shared_qk else [q, k, v]
    wrt += list(attention.parameters())
    gradients = [torch.autograd.grad(total, wrt) for total in (got, wanted)]
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-9)


def test_any_length():
    ones = torch.ones(B, dtype=torch.int32)
    for name, n in product(NAMES, (1, 64)):
        q, k, v = inputs(name, n)
        out = make(name, n)(q, k, v, None if n > 1 else ones)
        assert out.shape == q.shape and out.isfinite().all(), name
        if n == 1 and name != "linformer":
            torch.testing.assert_close(out, v, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_padding_alone_is_finite_and_has_no_gradient(name, options):
    q, k, v = (t.requires_grad_() for t in inputs(name))
    out = make(name, **options)(q, k, v, torch.tensor([N, 0], dtype=torch.int32))
    assert out.isfinite().all()
    for gradient in torch.autograd.grad(out[0].sum(), [q, v]):
        assert gradient.isfinite().all() and not gradient[1].any()


@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_autocast_is_finite_and_close(name):
    attention = make(name, dtype=torch.float32)
    q, k, v = (t.requires_grad_() for t in inputs(name, dtype=torch.float32))
    with torch.no_grad():
        expected = attention(*(t.bfloat16().float() for t in (q, k, v)), LENGTHS)
    with torch.autocast("cpu", torch.bfloat16):
        out = attention(q, k, v, LENGTHS)
    assert out.dtype == torch.bfloat16
    for gradient in torch.autograd.grad(out.float().square().sum(), [q, v]):
        assert gradient.isfinite().all()
    if name not in ("reformer", "smyrf"):  # the hashes of rounded tokens are others
        real = torch.arange(N) < LENGTHS[:, None]
        error = ((out - expected) * real[:, None, :, None]).square().mean().sqrt()
        assert error < 0.01 * expected.square().mean().sqrt()


@pytest.mark.parametrize("name", NAMES)
def test_it_compiles_into_one_graph(name):
    torch.compiler.reset()  # a few graphs of one function are all that it takes
    attention = make(name, dtype=torch.float32)
    q, k, v = inputs(name, dtype=torch.float32)
    with torch.no_grad():
        expected = attention(q, k, v, LENGTHS)
        out = torch.compile(attention, fullgraph=True, backend="eager")(q, k, v, LENGTHS)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", ["standard", "flash", "sparse", "linformer", "reformer", "smyrf"])
def test_dropout_drops_in_training_alone_and_follows_torchs_generator(name):
    attention = make(name, dropout=0.5)
    q, k, v = inputs(name)
    assert torch.equal(attention(q, k, v), attention(q, k, v))
    attention.train()
    torch.manual_seed(5)
    first, second = attention(q, k, v), attention(q, k, v)
    torch.manual_seed(5)
    assert torch.equal(first, attention(q, k, v)) and not torch.equal(first, second)


@pytest.mark.parametrize("cls", [Reformer, Smyrf])
def test_every_call_draws_new_hashes_unless_told_to_keep_them(cls):
    attention = cls(heads=H, head_dim=D, length=N)
    q, k, v = inputs(cls.__name__.lower(), dtype=torch.float32)
    for mode in (attention.train, attention.eval):
        assert not torch.equal(mode()(q, k, v), attention(q, k, v))
    attention.redraw = False
    assert torch.equal(attention(q, k, v), attention(q, k, v))


def test_performer_estimates_softmax_attention():
    torch.manual_seed(0)
    features = 4096
    sizes = {"heads": H, "head_dim": D, "length": N}
    attention = make_attention("performer", **sizes, features=features).double()
    q, k, v = inputs("performer")
    exact = softmax_oracle(q / 2, k / 2, v, torch.ones(N, N, dtype=torch.bool))
    error = (attention(q / 2, k / 2, v) - exact).square().mean().sqrt()
    assert error < 0.1 * exact.square().mean().sqrt()
    rows = attention.projection[:D]
    products = rows @ rows.T
    assert (products - products.diag().diag()).abs().max() < 1e-4  # orthogonal


def test_performer_learns_from_large_queries_and_keys():
    """Its weights do not become equal: gradients are of the size of those of softmax attention."""
    for std in (1.5, 2.0, 5.0):
        q, k, v = (scale * x for scale, x in zip((std, std, 1), inputs("performer"), strict=True))
        found = []
        for name in ("performer", "standard"):
            leaves = [x.clone().requires_grad_() for x in (q, k)]
            loss = make(name)(*leaves, v, LENGTHS).square().sum()
            found.append([x.norm() for x in torch.autograd.grad(loss, leaves)])
        for ours, exact in zip(*found, strict=True):
            assert 0.1 * exact < ours < 10 * exact, std


def test_sizes_go_by_the_length():
    lengths = [1000, 1024, 2000, 2048, 4000, 4096, 4097, 16384, 16]
    assert [budget(n, 16, 256) for n in lengths] == [64, 64, 128, 128, 256, 256, 256, 256, 16]
    assert [budget(n, 32, 128) for n in lengths] == [32, 32, 64, 64, 128, 128, 128, 128, 16]
    layer = make_attention("reformer", heads=H, head_dim=D, length=2048, bucket=None, hashes=4)
    assert isinstance(layer, Reformer) and (layer.bucket, layer.halves) == (64, 16)
    assert layer.scale == D**-0.5


def test_the_default_mask_skips_more_than_half_of_its_blocks():
    for length in (256, 512, 1000, 1024, 2000, 2048, 4096, 16384, 65536):
        attention = make_attention("sparse", heads=H, head_dim=D, length=length)
        assert attention.blocks.density < 0.5
        assert attention.blocks.stats().partial == 0 or length % 128
        assert attention.blocks.block_size == (default_block(length),) * 2
    sizes = {"heads": H, "head_dim": D, "length": N}
    mask = masks.layers(masks.local(8), masks.dense())
    per_layer = [make_attention("sparse", **sizes, layer=i, mask=mask).mask for i in (0, 1)]
    assert per_layer == [masks.local(8), masks.dense()]


def test_the_block_size_changes_what_is_computed_and_not_the_result():
    sizes = {"heads": H, "head_dim": D, "length": 1024, "mask": "local:20+global_tokens:3"}
    sizes["backend"] = "cpu"
    layers = [make_attention("sparse", **sizes, block_size=b) for b in (32, 64, 128, 48)]
    density = [layer.blocks.density for layer in layers]
    assert density[0] < density[1] < density[2]
    assert [layer.padding for layer in layers] == ["skip", "skip", "skip", "hide"]
    q, k, v = torch.randn(3, 1, H, 1024, D)
    lengths = torch.tensor([700], dtype=torch.int32)
    outs = [layer(q, k, v, layer.plan(lengths, q.dtype)) for layer in layers]
    for out in outs[1:]:
        torch.testing.assert_close(out[:, :, :700], outs[0][:, :, :700])


def test_errors():
    for name, options, message in (
        ("flashy", {}, "attention='flashy'.*flash"),
        ("local", {"windows": 3}, "windows.*: choose from window"),
        ("local", {"window": 1.5}, "window=1.5"),
        ("performer", {"scale": "1/D"}, "scale='1/D'"),
        ("performer", {"kernel": "elu"}, "kernel='elu': choose from softmax, relu"),
        ("performer", {"kernel": "relu", "features": 8}, "features and scale are for kernel=soft"),
        ("linear", {"normalise": 1}, "normalise=1"),
        ("linformer", {"shared": True, "same_kv": True}, "same_kv are both"),
        ("flash", {"padding": "skip"}, "multiple of 128"),
        ("sparse", {"block_size": 24}, "block_size.* 24"),
    ):
        with pytest.raises(ValueError, match=message):
            make_attention(name, heads=H, head_dim=D, length=N, **options)


def test_reformer_is_that_of_transformers(monkeypatch):
    theirs = pytest.importorskip("transformers.models.reformer.modeling_reformer")
    n, dim = 128, 16
    config = pytest.importorskip("transformers").ReformerConfig(
        hidden_size=dim, attention_head_size=dim, num_attention_heads=1, num_buckets=8,
        num_hashes=2, lsh_attn_chunk_length=16, attn_layers=["lsh"], is_decoder=False,
        lsh_attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    peer = theirs.LSHSelfAttention(config).eval()
    ours = make_attention("reformer", heads=1, head_dim=dim, length=n, bucket=16, scale=1).eval()
    ours.redraw = False
    x = torch.randn(B, n, dim)
    q, v = (layer(x)[:, None] for layer in (peer.query_key, peer.value))
    rotations = ours.rotations.view(1, dim, 2, -1)
    monkeypatch.setattr(torch, "randn", lambda shape, **_: rotations.view(shape))
    expected = peer(x).hidden_states
    torch.testing.assert_close(ours(q, q, v)[:, 0], expected, rtol=1e-4, atol=1e-5)
