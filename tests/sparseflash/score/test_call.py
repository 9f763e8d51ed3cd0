"""Score functions on their way through a call: ready rules, transforms, entries, errors."""

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention as torch_flex

import masks
import sparseflash
from sparseflash import score_rules
from sparseflash.integrations.flex import convert_score, flex_attention
from sparseflash.testing import make_qkv, relative_error
from tests.sparseflash.score.test_score import assert_near

BACKENDS = ("reference", "cpu")
relative = sparseflash.score(lambda s, h, q, k, bias: s + bias[h, k - q + 40])
capped = sparseflash.score(lambda s: 20 * np.tanh(s / 20))


def identity(s):
    return s * 1.0


def small(n=40, m=40, dtype=torch.float64, grad=True, heads=2):
    return make_qkv(1, heads, n, m, 8, dtype=dtype, requires_grad=grad)


def dense(q, k, v, x):
    """Attention of logits."""
    return x.softmax(-1) @ v


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
@pytest.mark.parametrize("hidden", ["entries", "a row", "all"])
def test_logits_of_minus_infinity(hidden, backend):
    """They hide a pair like a mask: no output of a row without others, and finite gradients."""
    dtype, limit = (torch.float32, 1e-6) if backend == "triton" else (torch.float64, 1e-12)
    q, k, v = small(70, 70, dtype=dtype)
    given = torch.randn(70, 70, dtype=dtype)
    off = {"entries": given > 0.5, "a row": torch.arange(70)[:, None] == 3}.get(hidden)
    given = given.masked_fill(torch.ones_like(given, dtype=torch.bool) if off is None else off,
                              -math.inf).requires_grad_()  # fmt: skip
    rule = sparseflash.score(lambda s, q, k, bias: s * np.exp(bias[q, k]) + bias[q, k])
    out, lse = sparseflash.attention(
        q, k, v, score=rule(bias=given), backend=backend, return_lse=True
    )
    grads = torch.autograd.grad(out.sum(), (q, k, v, given))
    assert all(t.isfinite().all() for t in (out, *grads))
    empty = (given == -math.inf).all(-1)
    assert (out[:, :, empty] == 0).all() and (lse[:, :, empty] == -math.inf).all()
    assert (grads[3][given == -math.inf] == 0).all()
    allowed = (given != -math.inf).detach()
    wanted = sparseflash.attention(
        q, k, v, allowed.numpy(), backend="reference",
        score=rule(bias=given.detach().masked_fill(~allowed, 0.0)),
    )  # fmt: skip
    assert relative_error(out, wanted) < limit


@pytest.mark.parametrize("backend", BACKENDS)
def test_excluded_pairs_are_never_visible(backend):
    """Neither their scores nor what the function makes of them."""
    q, k, v = small(53, 53)
    rule = sparseflash.score(lambda s, q, k, t: s + t[q] * np.log(q - k + 1) + np.sqrt(q - k))
    t = torch.randn(53, dtype=torch.float64, requires_grad=True)
    if backend == "cpu":
        k.data[:, :, -1] = math.nan
    mask = masks.where(lambda q, k: (q >= k) & (k < 52))
    out = sparseflash.attention(q, k, v, mask, score=rule(t=t), backend=backend)
    grads = torch.autograd.grad(out.sum(), (q, k, v, t))
    assert all(x.isfinite().all() for x in (out, *grads))
    i, j = torch.arange(53)[:, None], torch.arange(52)
    x = q.detach() @ k.detach()[:, :, :52].mT * 8**-0.5
    x = x + t.detach()[:, None] * (i - j + 1).double().log() + (i - j).double().sqrt()
    assert_near(out, dense(q, k, v.detach()[:, :, :52], x.masked_fill(i < j, -math.inf)), 1e-12)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_in_a_table_shows_where_it_is_read(backend):
    q, k, v = small(grad=False)
    bias = torch.zeros(2, 80, dtype=torch.float64)
    bias[1, 40 + 35] = math.nan  # keys 35 after their query
    out = sparseflash.attention(q, k, v, score=relative(bias=bias), backend=backend)
    bad = torch.arange(40) < 5
    assert out[:, 1, bad].isnan().all() and out[:, 1, ~bad].isfinite().all()
    assert out[:, 0].isfinite().all()


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_nan_passes_minima_and_maxima(backend):
    q, k, v = small(grad=False, dtype=torch.float32)
    k[0, 0, 7, 3] = math.nan
    rule = sparseflash.score(lambda s: s.clip(min=-1.0).clip(max=1.0))
    out = sparseflash.attention(q, k, v, score=rule, backend=backend)
    assert out[0, 0].isnan().all() and out[0, 1].isfinite().all()


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_an_index_outside_takes_the_nearest_entry(backend):
    """Also an infinite one."""
    q, k, v = (x.detach().float() for x in small())
    bias = torch.randn(2, 7, requires_grad=True)
    for index, within in (
        (lambda q, k, n: k - q + 3, lambda q, k, n: np.clip(k - q + 3, 0, 6)),
        (lambda q, k, n: np.floor(5.5 / abs(q - k)),
         lambda q, k, n: np.where(q == k, 6, np.floor(5.5 / np.maximum(1, abs(q - k))))),
        (lambda q, k, n: n, lambda q, k, n: 6),
    ):  # fmt: skip
        found = []
        for at in (index, within):
            rule = sparseflash.score(lambda s, h, q, k, n_k, t, at=at: s + t[h, at(q, k, n_k)])
            out = sparseflash.attention(q, k, v, score=rule(t=bias), backend=backend)
            found += torch.autograd.grad(out.square().sum(), bias)
        assert_near(*found, 1e-6)


@pytest.mark.parametrize("backend", [*BACKENDS, "triton"])
def test_operators_keep_the_dtypes_of_tables(backend):
    q, k, v = small(dtype=torch.float32, grad=False)
    bias = torch.randn(2, 90, dtype=torch.bfloat16)
    key = relative(bias=bias.requires_grad_()).key()
    call = "", None, None, None, torch.rand(2), [bias.detach()], None, 0.0, False, backend, key
    out, lse, _ = torch.ops.sparseflash.forward(q, k, v, *call, False, False)
    arguments = torch.ones_like(out), None, q, k, v, out, lse, *call, False, False
    backward = torch.ops.sparseflash.backward.default
    torch.library.opcheck(backward, arguments, test_utils="test_faketensor")


def test_ready_rules():
    """Beside what their models compute."""
    q, k, v = small(49, 49, grad=False)
    s = q @ k.mT * 8**-0.5
    h, i, j = torch.arange(2)[:, None, None], torch.arange(49)[:, None], torch.arange(49)
    slopes, bias = torch.rand(2).double(), torch.randn(2, 9).double()
    both, table = torch.randn(1, 2, 49, 49).double(), torch.randn(13 * 13, 2).double()
    place = torch.stack(torch.meshgrid(torch.arange(7), torch.arange(7), indexing="ij")).flatten(1)
    apart = place[:, :, None] - place[:, None]
    index = (apart[0] + 6) * 13 + apart[1] + 6
    for rule, x in (
        (score_rules.softcap(2.0), 2 * (s / 2).tanh()),
        (score_rules.alibi(slopes=slopes), s - slopes[h] * (i - j).abs()),
        (score_rules.pair(bias=both), s + both),
        (score_rules.relative(4)(bias=bias), s + bias[h, (j - i).clamp(-4, 4) + 4]),
        (score_rules.swin(7)(bias=table), s + table[index].permute(2, 0, 1)),
    ):
        assert_near(sparseflash.attention(q, k, v, score=rule), dense(q, k, v, x), 1e-12)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_t5_has_the_buckets_of_transformers(bidirectional):
    t5 = pytest.importorskip("transformers.models.t5.modeling_t5")
    for buckets, most in ((32, 128), (32, 64), (64, 512), (20, 100)):
        q, k, v = small(300, 600, grad=False, heads=1)
        table = torch.randn(buckets, 1, dtype=torch.float64)
        distance = torch.arange(600) - torch.arange(300, 600)[:, None]
        bucket = t5.T5Attention._relative_position_bucket(distance, bidirectional, buckets, most)
        rule = score_rules.t5(buckets, most, bidirectional)
        found = sparseflash.attention(q, k, v, score=rule(bias=table), scale=1.0)
        assert_near(found, dense(q, k, v, q @ k.mT + table[bucket, 0]), 1e-12)


BIAS, SLOPES, PAIRS = torch.randn(2, 90), torch.rand(2), torch.randn(1, 2, 40, 40)
DOCUMENT = torch.arange(40) // 9
PREFIX = torch.tensor([7])
SCORE_MODS = {
    "checkerboard": lambda s, b, h, q, k: torch.where(torch.abs(k - q) % 2 == 1, s * 0.5, s),
    "causal": lambda s, b, h, q, k: torch.where(q >= k, s, -float("inf")),
    "causal and soft-capped": lambda s, b, h, q, k: torch.where(
        q >= k, 5 * torch.tanh(s / 5), -9e9
    ),
    "alibi": lambda s, b, h, q, k: s + (k - q) * torch.exp2(-((h + 1) * 8.0 / 2)),
    "slopes": lambda s, b, h, q, k: s + SLOPES[h] * (k - q),
    "bias": lambda s, b, h, q, k: s + BIAS[h, (k - q).clamp(-10, 10) + 10],
    "heads": lambda s, b, h, q, k: torch.where(h % 2 == 0, s, s * 2 + b),
    "squared": lambda s, b, h, q, k: s * s,
    "silu": lambda s, b, h, q, k: s * torch.sigmoid(s),
    "bias of a pair": lambda s, b, h, q, k: s + PAIRS[b, h, q, k],
    "documents": lambda s, b, h, q, k: torch.where(DOCUMENT[q] == DOCUMENT[k], s, -float("inf")),
    "prefix": lambda s, b, h, q, k: torch.where((q >= k) | (k < PREFIX[b]), s, -float("inf")),
    "neighbours": lambda s, b, h, q, k: torch.where(
        (abs(q // 8 - k // 8) <= 1) & (abs(q % 8 - k % 8) <= 2), s, -float("inf")
    ),
}


@pytest.mark.parametrize("name", SCORE_MODS)
def test_score_mods_of_flex_attention(name):
    q, k, v = small(dtype=torch.float32, grad=False)
    wanted = torch_flex(q, k, v, SCORE_MODS[name])
    assert relative_error(flex_attention(q, k, v, SCORE_MODS[name]), wanted) < 2e-6


def test_tensors_of_the_closure_get_gradients():
    q, k, v = small(grad=False)
    bias, factor = torch.randn(2, 90).requires_grad_(), torch.tensor(0.7, requires_grad=True)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score * factor + bias[h, kv_idx - q_idx + 40]

    found = torch.autograd.grad(flex_attention(q, k, v, score_mod).square().sum(), (bias, factor))
    s = q @ k.mT * 8**-0.5 * factor + bias[:, torch.arange(40) - torch.arange(40)[:, None] + 40]
    wanted = torch.autograd.grad(dense(q, k, v, s).square().sum(), (bias, factor))
    for x, y in zip(found, wanted, strict=True):
        assert_near(x, y, 1e-5)
    made = convert_score(score_mod)
    compiled = torch.compile(
        lambda *qkv: flex_attention(*qkv, made), fullgraph=True, backend="aot_eager"
    )
    assert_near(compiled(q, k, v), flex_attention(q, k, v, score_mod), 1e-12)


def test_new_tables_take_one_graph_and_new_sizes_another():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def attend(q, k, v, bias):
        return sparseflash.attention(q, k, v, masks.causal(), score=relative(bias=bias))

    compiled = torch.compile(attend, fullgraph=True, backend=counter)
    for size in (80, 80, 90, 100):
        q, k, v = small()
        bias = torch.randn(2, size, dtype=torch.float64, requires_grad=True)
        found, wanted = (
            torch.autograd.grad(f(q, k, v, bias).square().sum(), (q, bias))
            for f in (compiled, attend)
        )
        assert all(map(torch.equal, found, wanted))
    assert counter.frame_count == 2


def test_a_rule_made_in_a_compiled_function_breaks_its_graph():
    def attend(q, k, v):
        return sparseflash.attention(q, k, v, score=score_rules.softcap(5.0))

    q, k, v = small(grad=False)
    assert torch.equal(torch.compile(attend, backend="eager")(q, k, v), attend(q, k, v))
    torch._dynamo.reset()
    with pytest.raises(torch._dynamo.exc.Unsupported, match="outside of the compiled function"):
        torch.compile(attend, backend="eager", fullgraph=True)(q, k, v)


def test_copies_and_pickles_are_the_same_rule():
    bias = torch.randn(2, 80)
    for made in (copy.deepcopy(relative), pickle.loads(pickle.dumps(sparseflash.score(identity)))):
        tables = {"bias": bias} if made.names else {}
        assert made(**tables).key() == (relative(bias=bias) if tables else made()).key()
    ready = {score_rules.softcap(5.0): 0, score_rules.alibi: 1, score_rules.pair: 4}
    ready |= {score_rules.relative(3): 2, score_rules.t5(): 2, score_rules.swin(3, 4): 2}
    for rule, ndim in ready.items():
        tables = dict.fromkeys(rule.names, torch.ones((2,) * ndim))
        made = pickle.loads(pickle.dumps(rule))
        assert made(**tables).key() == rule(**tables).key()


def test_export_and_transforms():
    q, k, v = small(grad=False)
    bias = torch.randn(3, 2, 80, dtype=torch.float64)

    class Layer(torch.nn.Module):
        def forward(self, q, k, v, bias):
            return sparseflash.attention(q, k, v, score=relative(bias=bias))

    exported = torch.export.export(Layer(), (q, k, v, bias[0]))
    assert torch.equal(exported.module()(q, k, v, bias[1]), Layer()(q, k, v, bias[1]))

    def loss(bias):
        return Layer()(q, k, v, bias).square().sum()

    each = [b.clone().requires_grad_() for b in bias]
    wanted = torch.stack([torch.autograd.grad(loss(b), b)[0] for b in each])
    assert torch.equal(torch.func.vmap(torch.func.grad(loss))(bias), wanted)


def test_entries_pass_the_score_on():
    """Beside a sink and lengths, in a layer, and with nothing to attend to."""
    layer = sparseflash.BlockSparseAttention(16, 2, mask=masks.causal(), bias=False)
    x, slopes = torch.randn(2, 128, 16), torch.rand(2).requires_grad_()
    score = score_rules.alibi(slopes=slopes)
    found = layer(x, score=score, lengths=[100, 128])
    q, k, v = (f(x).unflatten(2, (2, 8)).transpose(1, 2) for f in (layer.q, layer.k, layer.v))
    i, j = torch.arange(128)[:, None], torch.arange(128)
    s = q @ k.mT * 8**-0.5 - slopes[:, None, None] * abs(i - j)
    s = s.masked_fill((i < j) | (j >= torch.tensor([100, 128])[:, None, None, None]), -math.inf)
    wanted = layer.out(dense(q, k, v, s).transpose(1, 2).flatten(2))
    assert_near(found[0, :100], wanted[0, :100], 1e-5)
    assert_near(found[1], wanted[1], 1e-5)
    assert "reference" not in sparseflash.explain(q, k, v, score=score).splitlines()[0]
    nothing = sparseflash.attention(q[:, :, :0], k, v, score=score)
    assert torch.autograd.grad(nothing.sum(), slopes)[0].eq(0).all()


T = torch.zeros(2, 80)
REFUSED = {
    "no argument s": lambda q, k: q - k,
    "argument": lambda s, *tables: s,
    "truth values": lambda s, q, k: q > k,
    "np.where": lambda s, q, k: s if q > k else -s,
    "does not use the score": lambda s, q, k: q - k,
    "np.sin is not known": lambda s: np.sin(s),
    "write np.tanh": lambda s: math.tanh(s),
    "fails on symbols": lambda s: s.item() * 2,
    "make it an argument": lambda s, h: s + T[h, 0],
    "np.array|an array": lambda s, h: s + np.zeros(3)[h],
    "masks.table": lambda s, q: s + masks.table(np.arange(9))[q],
    "np.isin": lambda s, q: np.where(np.isin(q, [1, 2]), s, 0.0),
    "t has 2 dimensions and is read with 1": lambda s, h, t: s + t[h],
    "t has 2 dimensions and is read with 0": lambda s, t: t + s,
    "index 1 of t depends on the score": lambda s, h, t: s + t[h, np.floor(s)],
    "index 1 of t is no integer": lambda s, q, h, t: s + t[h, q / 2],
    "call it with t=": lambda s, t, u: s + t[0, 0] + u,
}


@pytest.mark.parametrize("message", REFUSED)
def test_functions_that_are_refused(message):
    """Without tensors where they are defined, else where they are bound."""
    with pytest.raises(ValueError, match=message):
        sparseflash.score(REFUSED[message])(t=T)


def test_errors_of_a_call():
    q, k, v = small(heads=4, grad=False)
    bound = relative(bias=T)
    per_query = sparseflash.score(lambda s, q, t: s + t[q])(t=torch.zeros(30))
    on_meta = relative(bias=torch.zeros(4, 80, device="meta"))
    for options, message in (
        ({"score": bound}, "dimension 0 of bias has 2 entries.* h .*3"),
        ({"score": per_query}, "dimension 0 of t has 30 entries.* q .*39"),
        ({"score": relative}, "call it with bias="),
        ({"score": lambda s: s}, "sparseflash.score"),
        ({"score": 3.0}, "score is float"),
        ({"score": on_meta}, "bias is on meta"),
        ({"score": relative(bias=torch.zeros(4, 0))}, r"bias has shape \(4, 0\)"),
        ({"score": capped, "lengths": [30]}, "lengths"),
    ):
        with pytest.raises(ValueError, match=message):
            sparseflash.attention(q, k, v, **options)
    with pytest.raises(ValueError, match="dimension 0 of bias has 2"):
        sparseflash.decode(q, k, v, score=bound)
    with pytest.raises(ValueError, match="is int"):
        relative(bias=3)
    with pytest.raises(ValueError, match="cap is 0"):
        score_rules.softcap(0)
    with pytest.raises(ValueError, match="score is given 'tanh'; pass a function"):
        sparseflash.score("tanh")  # pyright: ignore[reportArgumentType]
