"""Score functions on a GPU: random calls against float64, bits, and new tables without new kernels.

python -m tests.gpu.test_score 1000

On a Hopper GPU both backends run each call that they can. Without a GPU, under TRITON_INTERPRET=1,
that checks such calls in float16 and float32.
"""

import random
import sys

import pytest
import torch

import masks
import sparseflash
from sparseflash.testing import make_qkv
from tests.gpu_calls import GPU, IS_HOPPER, captured
from tests.sparseflash.score.cases import CASES, results
from tests.sparseflash.score.cases import check as check_case

pytestmark = GPU
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LIMITS = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 5e-5}  # of the norm
MASKS = (
    None,
    masks.causal(),
    masks.causal(align="bottom_right") | masks.global_tokens(20),
    masks.local(40) | masks.butterfly(16),
    masks.random_blocks(0.4, block=32, seed=1, per_head=True),
    masks.where(lambda q, k: (q * 7 + k * 3) % 11 < 4),  # all blocks are partial
)


def check(name, sizes, mask, dtype, **options):
    more = {"backends": ["triton"], "device": DEVICE, "head_dim": 64, "limit": LIMITS[dtype]}
    tables = dtype if options.get("seed", 0) % 2 else torch.float32
    check_case(CASES[name], sizes, mask, dtype=dtype, tables=tables, **more | options)


def widest(name):
    """The head dim up to which the Hopper backward takes a rule."""
    return 64 if {"k", "qk"} & {*CASES[name].reach} else 128


def check_random(seed):
    """Check a call. Eight seeds in a row share kernels, which compile for longer than they run."""
    kind, rng = random.Random(-1 - seed // 8), random.Random(seed)
    dtypes = (torch.bfloat16, torch.bfloat16, torch.float16, torch.float32)[2 * (DEVICE == "cpu") :]
    name, dtype = kind.choice(list(CASES)), kind.choice(dtypes)
    head_dim = kind.choice((16, 40, 64, 64, 128, 256))
    more = {
        "head_dim": head_dim,
        "v_head_dim": kind.choice((None, None, 32, 64)),
        "dropout_p": kind.choice((0.0, 0.0, 0.3)),
        "sink": kind.random() < 0.3,
        "deterministic": kind.random() < 0.5,
    }
    n, kv_heads = rng.choice((1, 17, 64, 100, 128, 150, 333)), rng.choice((1, 2))
    sizes = rng.choice((1, 2)), kv_heads * rng.choice((1, 2, 3)), n, rng.choice((n, n, 33, 150))
    mask = rng.choice(MASKS)
    on_hopper = IS_HOPPER and dtype != torch.float32 and head_dim <= widest(name)
    backends = ("triton", "hopper") if on_hopper else ("triton",)
    check(name, sizes, mask, dtype, kv_heads=kv_heads, seed=seed, backends=backends, **more)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_calls(first):
    for seed in range(first, first + 20):
        check_random(seed)


@pytest.mark.parametrize("name", CASES)
def test_each_rule(name):
    for dtype in (torch.bfloat16, torch.float32):
        # with this seed no score is so near to the kink of |s + t| that rounding crosses it
        check(name, (1, 4, 150, 150), MASKS[3], dtype, kv_heads=2, seed=8)
        check(name, (2, 2, 130, 140), None, dtype, head_dim=128, seed=8)


@pytest.mark.skipif(not IS_HOPPER, reason="needs a Hopper GPU")
@pytest.mark.parametrize("name", CASES)
def test_each_rule_on_hopper(name):
    """Dense, causal, gathered and partial tiles; with what calls may add."""

    def run(sizes, mask, dtype, head_dim=64, **options):
        width = min(head_dim, widest(name))
        check(name, sizes, mask, dtype, backends=("hopper",), head_dim=width, **options)

    run((2, 2, 300, 380), None, torch.float16, 128)
    run((1, 4, 600, 600), MASKS[1], torch.bfloat16, kv_heads=2)
    run((1, 4, 300, 300), MASKS[4], torch.bfloat16, 96, kv_heads=2, deterministic=True)
    run((1, 2, 270, 270), MASKS[3], torch.float16, sink=True, dropout_p=0.2, seed=5)


@pytest.mark.parametrize("name", ["softcap", "alibi", "pair"])
@pytest.mark.parametrize("length, mask", [(4500, masks.local(64) | masks.global_tokens(64))])
def test_split_rows(name, length, mask):
    backends = ("triton", "hopper") if IS_HOPPER else ("triton",)
    more = {"head_dim": widest(name), "backends": backends}
    check(name, (1, 1, length, length), mask, torch.bfloat16, **more)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("backend", ["triton", *["hopper"] * IS_HOPPER])
def test_far_pairs_take_one_entry(backend, fixed):
    """Of a table that knows short distances alone; with a gradient, and without."""
    dtype = torch.float32 if backend == "triton" else torch.bfloat16
    given = make_qkv(1, 2, 4500, 4500, 64, dtype=dtype, device="cuda", requires_grad=True)
    mask = masks.sliding(600) | masks.global_tokens(64)
    found = []
    for backend_, wide in ((backend, dtype), ("reference", torch.float64)):
        bias = torch.linspace(-1, 1, 82, device="cuda").view(2, 41).requires_grad_(not fixed)
        score = sparseflash.score_rules.relative(20)(bias=bias)
        qkv = [x.detach().to(wide).requires_grad_() for x in given]
        out = sparseflash.attention(*qkv, mask, score=score, backend=backend_)
        wanted = qkv if fixed else [*qkv, bias]
        found.append([out, *torch.autograd.grad(out.square().sum(), wanted)])
    for x, y in zip(*found, strict=True):
        assert (x - y).norm() <= LIMITS[dtype] * y.norm()


@pytest.mark.parametrize("n, mask", [(1, masks.causal()), (40, None), (140, None)])
def test_an_entry_of_all_pairs_is_not_that_of_pairs_beyond_the_end(n, mask, backend):
    steps = CASES["relative"]._replace(fn=lambda s, h, q, k, bias: s + bias[h, (k - q) // 70 + 5])
    check_case(
        steps, (1, 2, n, n), mask, dtype=torch.float16, limit=LIMITS[torch.float16],
        backends=[backend], device=DEVICE, head_dim=64,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_gradients_have_the_same_bits(name, backend):
    def run():
        more = {"deterministic": True, "backends": [backend], "device": "cuda", "head_dim": 64}
        more |= {"dtype": torch.bfloat16, "seed": 3}
        return results(CASES[name], (2, 4, 150, 150), MASKS[1], **more)[0][0]

    first = run()
    for _ in range(5):
        assert all(map(torch.equal, run(), first))


def kernels():
    """How many kernels Triton has compiled or loaded."""
    from sparseflash.kernels.portable import backward, forward

    found = forward.attention_forward, backward.backward_kv, backward.backward_q
    return sum(len(cache[0]) for kernel in found for cache in kernel.device_caches.values())


def test_new_tables_take_the_kernels_that_there_are():
    q, k, v = make_qkv(1, 4, 256, 256, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    rule, known = sparseflash.score(CASES["relative"].fn), None
    for step in range(6):
        bias = torch.randn(4, 1400, device="cuda").requires_grad_()
        out = sparseflash.attention(q, k, v, score=rule(bias=bias))
        (grad,) = torch.autograd.grad(out.square().sum(), bias)
        want = sparseflash.attention(q, k, v, score=rule(bias=bias), backend="reference")
        (of_reference,) = torch.autograd.grad(want.square().sum(), bias)
        assert (grad - of_reference).norm() <= 3e-2 * of_reference.norm()
        if step == 1:
            known = kernels()
    assert kernels() == known


def test_a_graph_follows_its_tables():
    q, k, v = make_qkv(1, 4, 200, 200, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    bias = torch.randn(4, 1400, device="cuda").requires_grad_()
    score = sparseflash.score(CASES["relative"].fn)(bias=bias)

    def step():
        out = sparseflash.attention(q, k, v, masks.causal(), score=score)
        return out.detach(), *torch.autograd.grad(out.square().sum(), (q, bias))

    step()
    graph, results = captured(step)
    with torch.no_grad():
        bias.normal_()
    graph.replay()
    assert all(map(torch.equal, results, step()))


if __name__ == "__main__":
    wrong = 0
    for number in range(int(sys.argv[1])):
        try:
            check_random(number)
        except Exception as error:
            wrong += 1
            print(f"seed {number}: {type(error).__name__}: {str(error)[-200:]}")
    print(f"{wrong} of {sys.argv[1]} wrong")
    sys.exit(bool(wrong))
