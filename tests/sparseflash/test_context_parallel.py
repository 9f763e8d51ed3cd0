"""Context parallelism on gloo processes: outputs, gradients and bytes against one process."""

import contextlib
import itertools
import pickle
from functools import partial
from typing import Any, cast

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import masks
import sparseflash
from masks.analysis.partition import RULES
from sparseflash import select
from sparseflash.distributed import attention as operators
from sparseflash.distributed import context_parallel
from sparseflash.distributed import exchange as exchange_of
from sparseflash.distributed.exchange import Chosen, Rows, Transfer, Units
from sparseflash.distributed.places import Places
from sparseflash.distributed.route import Exchange
from tests.notes import FUZZ
from tests.problems import BATCH, DIM, DIM_V, DROPOUT, FAMILIES, SCORE, SIZE, Call, by_sequence
from tests.processes import on_ranks


def beside(heads: int, dtype: torch.dtype) -> dict[str, Any]:
    """Return a sink, of one head without effect, and a cap of the scores."""
    sink = torch.linspace(0, 2, heads, dtype=dtype).log()
    return {"sink": sink, "score": sparseflash.score_rules.softcap(3.0)}


def close(a: torch.Tensor, b: torch.Tensor, tolerance: float) -> bool:
    """Without torch.testing, which imports DTensor."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=0, atol=tolerance)


def agree(cp: Any, found: Any, want: Any, tolerance: float, what: Any) -> None:
    for name, a, b in zip(("out", "lse", "dq", "dk", "dv"), found, want, strict=False):
        assert close(a, cp.shard(b, 2), tolerance), (what, name)
    for a, b in zip(found[5:], want[5:], strict=True):  # each rank has the share of its own queries
        total = a.clone()
        dist.all_reduce(total)
        assert close(total, b, 10 * tolerance), what


def least(blocks: Any, cp: Any, kv_heads: int) -> int:
    """Key units that this rank needs of others where no query travels: from the layout alone."""
    layout = blocks.layout() > 0
    if layout.shape[1] > 1:
        layout = layout.reshape(len(layout), kv_heads, -1, *layout.shape[2:]).any(2)
    need = layout[:, :, cp.owner == cp.rank].any(2)
    units = int(need[:, :, cp.owner != cp.rank].sum())
    return units * (BATCH // len(layout)) * (kv_heads // layout.shape[1])


def families(rank: int, world: int, n: int) -> None:
    joined = 0
    for i, (name, family) in enumerate(FAMILIES.items()):
        heads, kv_heads, more = (4, 4, name == "bits") if i % 3 == 0 else (8, 4, i % 2 == 0)
        dtype = torch.float32 if i % 4 == 3 else torch.float64
        mask = family(n)
        further: Any = beside(heads, dtype) if more else {}
        if not more and (i + n) % 3:
            further = {"scored": True}
        if (i + world) % 2:
            further |= DROPOUT
        call = Call(n, heads, kv_heads, mask, dtype, **further)
        tolerance = 1e-11 if dtype == torch.float64 else 3e-5
        rules = [*RULES]
        uneven = np.random.default_rng(i).integers(0, world, -(-n // SIZE))
        uneven[uneven == world - 1] = 0  # the last rank has no tokens
        plans: Any = [(rules[i % 4], "blocks"), (rules[(i + 1) % 4], "keys"), ("auto", "auto")]
        plans += [(uneven, "blocks"), ("zigzag", "heads")]
        for j in range(min(FUZZ, 5)):  # each family has three of them, in 2, 3 and 4 processes
            owner, route = plans[(i + 2 * world + j) % 5]
            what = (name, world, n, owner if isinstance(owner, str) else "uneven", route)
            cp: Any = context_parallel(
                None, mask, n, heads=heads, kv_heads=kv_heads, block_size=SIZE, owner=owner,
                route=route, gb_s=(450.0, 1e6)[(i // 2 + j) % 2],  # so fast: no overlap
            )  # fmt: skip
            joined += cp.route == "blocks" and cp.part.together
            agree(cp, call.on(cp), call.want, tolerance, what)
            if route == "keys":
                per = (BATCH // cp.part.slices[0]) * (kv_heads // cp.part.slices[1])
                assert cp.part.keys.received * per == least(cp.mask, cp, kv_heads), what
                width = SIZE * (DIM + DIM_V) * call.qkv[0].element_size()
                moved = cp.part.keys.sent + cp.part.keys.received  # keys, and gradients back
                assert cp.bytes_sent == moved * per * width, what
                first, second = (call.on(cp, deterministic=True) for _ in range(2))
                for a, b in zip(first[:5], second[:5], strict=True):
                    assert torch.equal(a, b), what
            x = torch.arange(n)
            assert torch.equal(cp.unshard(cp.shard(x, 0), 0), x)
    assert joined  # some waited for the keys that come, others computed the parts one by one


@pytest.mark.parametrize(("world", "n"), [(2, 300), (3, 192), (4, 256)])
def test_every_family_equals_one_process(world, n):
    on_ranks(world, families, n)


@pytest.mark.parametrize("backend", ["cpu", "triton"])
def test_a_part_scores_and_drops_as_the_whole_does(backend):
    n, heads, seed = 96, torch.tensor([2, 0]), torch.tensor([2**40 + 9])
    rows, cols = torch.tensor([[[32, 80, 0]]]), torch.tensor([[[64, 0, 16], [16, 80, 48]]])
    call = Call(n, 4, 4, None, torch.float32, scored=True)
    q, k, v = (x[:1] for x in call.qkv)
    dout, allowed = torch.zeros(1, 4, n, DIM_V), torch.zeros(4, n, n, dtype=torch.bool)
    sixteen = torch.arange(16)
    row, *columns = ((x[:, None] + sixteen).flatten() for x in (*rows[0], *cols[0]))
    for h, column in zip(heads.tolist(), columns, strict=True):
        dout[0, h, row] = call.dout[0, h, row]
        allowed[h, row[:, None], column] = True
    whole = {name: x.clone().requires_grad_() for name, x in call.tables.items()}
    part = {name: x.clone().requires_grad_() for name, x in call.tables.items()}
    exact = sparseflash.attention(
        q, k, v, allowed, score=SCORE(**whole), dropout_p=0.3, seed=seed, backend="reference"
    )
    exact.backward(dout)
    places = Places(heads, 4, rows, cols, torch.tensor(n))
    k, v = (
        torch.stack([x[0, h, c] for h, c in zip(heads, columns, strict=True)])[None] for x in (k, v)
    )
    out = sparseflash.attention(
        q[:, heads][:, :, row], k, v, score=places.score(SCORE(**part)), dropout_p=0.3,
        seed=places.keys(seed, 1), backend=backend,
    )  # fmt: skip
    out.backward(dout[:, heads][:, :, row])
    torch.testing.assert_close(out, exact[:, heads][:, :, row], atol=1e-5, rtol=1e-4)
    for name in whole:
        torch.testing.assert_close(part[name].grad, whole[name].grad, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("n", [96, 90])
def test_kernels_pack_add_and_merge_as_torch_does(n, monkeypatch):
    units, blocks = Units((2, 2), SIZE), 6
    g = torch.Generator().manual_seed(0)
    x, y = (torch.randn(4, n, 4, d, generator=g).transpose(1, 2) for d in (16, 24))
    chosen = np.array([3, 0, 23, 8, 5, 17])
    sent = Chosen(units, torch.from_numpy(chosen), blocks)
    exchange = Exchange(
        (chosen, np.array([0, 23])), (np.arange(2), np.arange(0)), 1, np.zeros(0, int)
    )
    transfer = Transfer.of(exchange, units, blocks, "cpu")
    rows = Rows(np.array([1, 4, 5]), SIZE, n, "cpu")
    come = torch.randn(8, SIZE, 2, 2, 40, generator=g)
    out, lse = torch.randn(4, 4, n, 16, generator=g), torch.randn(4, 4, n, generator=g)
    lse[0], lse[1, 1, 20:30] = -torch.inf, -torch.inf
    other, other_lse = (rows.take(t.flip(1).contiguous()) for t in (out, lse))
    other_lse[1, 1, :9] = -torch.inf

    def results():
        given: Any = [t.clone() for t in (x, y, x, out, lse)]
        packed, taken = sent.pack(x, y), rows.take(x)
        transfer.add(given[:2], come)
        rows.add(given[2], taken)
        operators._merge(given[3], given[4], other, other_lse, rows)
        joined = operators.joined(transfer, x, y, packed[: transfer.lines])
        return packed, taken, *given, *joined, transfer.behind.pack(*joined)

    plain = results()
    for module in (exchange_of, operators):
        monkeypatch.setattr(module, "in_kernels", lambda x: True)
    for a, b in zip(plain, results(), strict=True):
        torch.testing.assert_close(a, b)


def selectors(rank: int, world: int) -> None:
    """Blocks that are chosen at run time: those of one process, and no others travel."""
    n, within = (200, 400)[world > 4], masks.causal()
    by_head = masks.random_blocks(0.5, block=16, per_head=True)
    uneven = np.arange(-(-n // SIZE)) % 2 * (world - 1)  # only two ranks have tokens
    for i, (chosen, owner, route) in enumerate((
        (select.top_k(3, block_size=SIZE), uneven, "blocks"),
        (select.top_k(0.3, "bound", SIZE, within=within, always=masks.local(0)), "zigzag", "auto"),
        (select.mass(0.5, block_size=(32, SIZE), within=by_head), "contiguous", "keys"),
        (select.moba(32, 2, SIZE), uneven, "blocks"),
        (select.moba(48, 3, SIZE, union=True, within=by_head), "zigzag", "blocks"),
        (select.nsa(3, 16, 32, first=1, own=1), "contiguous", "blocks"),
        (select.nsa(3, 32, 16, within=masks.local(60)), "zigzag", "heads"),
    )):  # fmt: skip
        heads, kv_heads = (8, 8) if route == "heads" else ((4, 4), (6, 3))[i % 2]
        options: Any = beside(heads, torch.float64) if i > 3 else {"scored": i == 3}
        options |= DROPOUT if i % 3 == 2 else {}
        call = Call(n, heads, kv_heads, chosen, torch.float64, **options)
        cp = context_parallel(
            None, chosen, n, heads=heads, kv_heads=kv_heads, owner=owner, route=cast(Any, route)
        )
        agree(cp, call.on(cp), call.want, 1e-11, (chosen, owner))
        if i:
            continue
        layout = chosen(*call.qkv[:2]).to_block_mask().layout() > 0
        need = layout[:, :, cp.owner == rank].any(2)[:, :, cp.owner != rank].sum()
        need, before = torch.tensor(int(need)), cp.bytes_sent
        with torch.no_grad():
            sparseflash.attention(*(cp.shard(x, 2) for x in call.qkv), cp)
        sent = torch.tensor(cp.bytes_sent - before)
        for total in (need, sent):
            dist.all_reduce(total)
        blocks = len(uneven)  # each rank tells summaries, and what it needs
        told = BATCH * heads * (-(-blocks // 2) * DIM * 8 + blocks)
        assert sent == need * SIZE * (DIM + DIM_V) * 8 + world * told
    call = Call(n, 4, 4, None, torch.float64)
    cp = context_parallel(None, select.top_k(3, block_size=SIZE), n, heads=4, route="keys")
    q, k, v = (cp.shard(x, 2) for x in call.qkv)
    nothing, lse = sparseflash.attention(q[:0], k[:0], v[:0], cp, return_lse=True, dropout_p=0.5)
    assert nothing.shape == (0, 4, cp.tokens, DIM_V) and lse.shape == nothing.shape[:3]
    with pytest.raises(ValueError, match="lengths"):
        sparseflash.attention(q, k, v, cp, lengths=[3, 4])
    with pytest.raises(ValueError, match="head to head"):
        mine = select.top_k(3, block_size=SIZE, always=by_head)
        context_parallel(None, mine, n, heads=8, kv_heads=8, route="heads")
    if world == 2:
        padded = Call(n, 4, 4, select.top_k(3, block_size=SIZE), torch.float64, lengths=[130, n])
        heads = context_parallel(None, select.top_k(3, block_size=SIZE), n, heads=4, route="heads")
        agree(heads, padded.on(heads), padded.want, 1e-11, "lengths")
        with pytest.raises(ValueError, match="head to head"):
            heads.with_mask(mine)
        assert "chooses at each call" in heads.explain()
        assert heads.with_mask(mask := masks.local(9)) is heads.with_mask(mask)
    with pytest.raises(ValueError, match="block_size=64"):
        cp.with_mask(select.top_k(3, block_size=64))
    with pytest.raises(ValueError, match="summary"):
        own = select.BlockSelector((SIZE, SIZE), None, select.Rule("count", 3), None)
        cp.with_mask(own)


@pytest.mark.parametrize("world", [2, 3])
def test_selections_at_run_time_equal_one_process(world):
    on_ranks(world, selectors)


def composed(rank: int, world: int) -> None:
    """Activation checkpointing, torch.compile, half precision and second derivatives."""
    n, mask = 256, masks.longformer(32, 1, (0, 1)) & masks.causal()
    call = Call(n, 4, 2, mask, torch.float64)
    cp = context_parallel(None, mask, n, heads=4, kv_heads=2, block_size=SIZE)
    q, k, v = (cp.shard(x, 2).requires_grad_() for x in call.qkv)
    dout = cp.shard(call.dout, 2)
    bias = torch.linspace(-1, 1, 4 * 19, dtype=torch.float64).view(4, 19).requires_grad_()
    rule = sparseflash.score_rules.relative(9)

    def attend(q, k, v):
        options = {"dropout_p": 0.3, "seed": 5}
        return 2.0 * sparseflash.attention(q, k, v, cp, score=rule(bias=bias), **options)

    again = checkpoint(attend, q, k, v, use_reentrant=False)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")(q, k, v)
    outs = attend(q, k, v), again, compiled
    plain, *others = (torch.autograd.grad((x * dout).sum(), (q, k, v, bias)) for x in outs)
    for a, b, c in zip(plain, *others, strict=True):
        assert close(a, b, 1e-12) and close(a, c, 1e-12)
    plain = torch.autograd.grad((sparseflash.attention(q, k, v, cp) * dout).sum(), (q, k, v))
    q, k, v = (x.detach().bfloat16().requires_grad_() for x in (q, k, v))
    out = sparseflash.attention(q, k, v, cp)
    halves = torch.autograd.grad((out * dout.bfloat16()).sum(), (q, k, v))
    q, k, v = (x.bfloat16().double() for x in call.qkv)
    assert (out - cp.shard(sparseflash.attention(q, k, v, mask), 2)).abs().max() < 0.03
    for got, exact in zip(halves, plain, strict=True):
        assert (got - exact).abs().max() < 0.1
    chosen = select.top_k(3, block_size=SIZE), "auto", None
    for given, route, lengths in (mask, "heads", None), (mask, "blocks", [200] * BATCH), chosen:
        cp = context_parallel(None, given, n, heads=4, kv_heads=2, block_size=SIZE, route=route)
        q, k, v = (cp.shard(x, 2).requires_grad_() for x in call.qkv)
        attend = partial(sparseflash.attention, mask=cp, lengths=lengths, dropout_p=0.3, seed=5)
        assert close(torch.compile(attend, backend="aot_eager")(q, k, v), attend(q, k, v), 1e-12)
        for x in (attend(q, k, v), cp.unshard(k.tanh(), 2)):  # they send in the backward
            (dk,) = torch.autograd.grad(x.square().sum(), k, create_graph=True)
            with pytest.raises(RuntimeError, match=r"second derivatives|once_diff"):
                dk.sum().backward()


def refused(rank: int, world: int) -> None:
    mask = masks.causal()

    @contextlib.contextmanager
    def refuses(*words: str):
        with pytest.raises(ValueError) as caught:
            yield
        assert all(word in str(caught.value) for word in words), caught.value

    plan: Any = partial(context_parallel, None)
    own = partial(plan, mask, 256, heads=4, kv_heads=2)
    cp = own(block_size=SIZE)
    blocks = plan(mask.build(256, block_size=SIZE), 256, heads=4, kv_heads=2)
    pair = plan(by_sequence(256), 256, heads=4, kv_heads=2)
    q, k, v = qkv = [torch.randn(1, h, 128, 16) for h in (4, 2, 2)]
    layer = sparseflash.BlockSparseAttention(64, 4, kv_heads=2, mask=cp)
    attend: Any = partial(sparseflash.attention, *qkv)
    table = sparseflash.score_rules.pair(bias=torch.zeros(1, 4, 128, 256))
    by_head = masks.random_blocks(0.5, block=16, per_head=True)
    for words, call in (
        (["ranks [1]"], lambda: plan(masks.local(rank + 1), 256, block_size=SIZE)),
        (["ranks [1]"], lambda: plan(mask, 256, block_size=SIZE, heads=4 + 4 * rank)),
        (["route", "tokens"], lambda: plan(mask, 256, route="tokens")),
        (["owner", "nobody"], lambda: plan(mask, 256, block_size=SIZE, owner="nobody")),
        (["owner", "16"], lambda: plan(mask, 256, block_size=SIZE, owner=np.zeros(3, int))),
        (["route", "1 < 2"], lambda: plan(mask, 256, heads=4, kv_heads=1, route="heads")),
        (["mesh", "(rank, ranks)"], lambda: context_parallel((rank,), mask, 256)),
        (["heads=", "per_head"], lambda: plan(by_head, 256)),
        (["255 x 255", "256 tokens"], lambda: plan(mask.build(255), 256)),
        (["block_size=(48, 112)", "256"],
         lambda: plan(select.top_k(1, block_size=(48, 112)), 256, heads=4)),
        (["16 blocks", "take smaller"], lambda: mask.partition(256, 17, 16)),
        (["the mask is a plan", "pass ints"],
         lambda: layer(torch.zeros(1, 128, 64), lengths=sparseflash.plan(mask, *qkv))),
        (["max_scores", "heads"], lambda: attend(cp, return_max_scores=True)),
        (["dimension 2", "128", "255"], lambda: attend(cp, score=table)),
        (["lengths", "(1,)"], lambda: attend(cp, lengths=[3, 4])),
        (["lengths", "BlockMask"], lambda: attend(blocks, lengths=[3])),
        (["127", "128 tokens"], lambda: sparseflash.attention(*(x[:, :, 1:] for x in qkv), cp)),
        (["200", "256"], lambda: cp.shard(torch.zeros(1, 200))),
        (["200", "128"], lambda: cp.unshard(torch.zeros(1, 200))),
        (["batch 1", "2"], lambda: attend(pair)),
    ):  # fmt: skip
        with refuses(*words):
            call()
    cap, other = sparseflash.score_rules.softcap(3.0), sparseflash.score_rules.softcap(4.0)
    apart: list[dict[str, Any]] = [
        {"scale": 1.0 + rank},
        {"dropout_p": 0.5 * rank},  # before any rank tells the others its seed
        {"dropout_p": 0.5, "seed": rank},
        {"dropout_p": 0.5, "seed": 3 if rank else None},
        {"score": other if rank else cap},
        {"sink": torch.zeros(4) if rank else None},
    ]
    for given in (mask, select.top_k(1, block_size=SIZE)):
        for route, options in itertools.product(("blocks", "heads"), apart):  # at the first call
            cp = context_parallel(
                None, given, 256, heads=4, kv_heads=2, block_size=SIZE, route=route, owner="zigzag"
            )
            with refuses("ranks [1]"):
                sparseflash.attention(q, k, v, cp, **options)


def optional(rank: int, world: int) -> None:
    """Sinks, lengths, starts, dropout and largest logits, of all tokens and heads."""
    n, heads = 200, 4
    sink = torch.linspace(0.01, 0.3, heads, dtype=torch.float64)
    scored: Any = {"scored": True, "dropout_p": 0.2, "seed": 3}
    bounds: Any = {"lengths": [130, n], "starts": [0, 9]}
    causal, window = masks.causal(), masks.sliding(30) | masks.global_tokens(3)
    by_head = masks.random_blocks(0.3, block=16, per_head=True)
    for mask, owner, route, own, options in (
        (causal, "contiguous", "blocks", None, {"scored": True}),
        (by_sequence(n), "zigzag", "blocks", None, scored),
        (by_head, "zigzag", "heads", sink, scored),
        (window, "snake", "blocks", None, scored),
        (causal, "zigzag", "blocks", sink, bounds),
        (window, "contiguous", "blocks", sink, {"lengths": torch.tensor([n, 7])}),
        (window, "contiguous", "heads", None, bounds),
        (by_head, "zigzag", "heads", sink, {"dropout_p": 0.3, "seed": 5}),
        (by_sequence(n), "contiguous", "heads", None, {"dropout_p": 0.3, "seed": 2**62 + 1}),
    ):
        call = Call(n, heads, 2, mask, torch.float64, own, **options)
        cp = context_parallel(
            None, mask, n, heads=heads, kv_heads=2, block_size=SIZE, owner=owner,
            route=cast(Any, route),
        )  # fmt: skip
        agree(cp, call.on(cp), call.want, 1e-10, (mask, owner, route, list(options)))
    cp = context_parallel(None, window, n, heads=heads, block_size=SIZE, route="heads")
    q = torch.randn(1, heads, n, DIM, generator=torch.Generator().manual_seed(0))
    *_, want = sparseflash.attention(q, q, q, window, return_lse=True, return_max_scores=True)
    own = cp.shard(q, 2)
    *_, scores = sparseflash.attention(own, own, own, cp, return_lse=True, return_max_scores=True)
    assert close(scores, cp.shard(want, 2), 1e-5)
    torch.manual_seed(rank)  # the ranks agree on a seed
    assert sparseflash.attention(own, own, own, cp, dropout_p=0.5).isfinite().all()


def meshes(rank: int, world: int) -> None:
    """Heads on one dimension of a mesh, blocks of tokens on the other."""
    n, heads, kv_heads = 200, 6, 3
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("heads", "blocks"))
    causal, by_head = masks.causal(), masks.random_blocks(0.3, block=16, per_head=True)
    for mask, owner, options in (
        (causal, "zigzag", {"lengths": [130, n]}),
        (by_head, "zigzag", {"scored": True, **DROPOUT}),
        (masks.longformer(32, 1, (0, 1)), "snake", {"scored": True, **DROPOUT}),
    ):
        call = Call(n, heads, kv_heads, mask, torch.float64, **options)
        cp = context_parallel(
            mesh, mask, n, heads=heads, kv_heads=kv_heads, block_size=SIZE, owner=owner
        )
        agree(cp, call.on(cp), call.want, 1e-10, (mask, owner))
        assert cp.tokens < n / 3 and "heads" in cp.explain()
    x = torch.arange(n, dtype=torch.float64).requires_grad_()
    whole = cp.unshard(cp.shard(x, 0), 0)
    assert torch.equal(whole, x)
    (gradient,) = torch.autograd.grad(whole.square().sum(), x)  # every rank has this loss
    dist.all_reduce(gradient)
    assert torch.equal(gradient, world * 2 * x.detach())
    other = cp.with_mask(by_head)
    assert torch.equal(other.positions(), cp.positions())
    with pytest.raises(ValueError, match="key heads"):
        context_parallel(mesh, causal, n, heads=heads, kv_heads=1, block_size=SIZE)
    with pytest.raises(ValueError, match="takes a mask, not the selector"):
        context_parallel(mesh, select.top_k(2, block_size=SIZE), n, heads=heads)
    torch.manual_seed(rank)  # the ranks agree on a seed
    q = torch.randn(1, heads, cp.tokens, DIM)
    assert sparseflash.attention(q, q[:, :3], q[:, :3], cp, dropout_p=0.5).isfinite().all()


def meshes_and_weights(rank: int, world: int) -> None:
    meshes(rank, world)
    sharded_weights(rank, world)


def test_meshes_of_two_dimensions():
    on_ranks(4, meshes_and_weights)


def planned_elsewhere(rank: int, world: int) -> None:
    """A plan that a process without a group made, as a worker of a data loader does."""
    n, mask, moba = 200, masks.longformer(32, 1, (0, 1)), select.moba(32, 2, SIZE)
    for chosen in (mask, moba):
        call = Call(n, 4, 2, chosen, torch.float64)
        options: Any = {"heads": 4, "kv_heads": 2, "owner": "contiguous", "block_size": SIZE}
        unbound = context_parallel((rank, world), chosen, n, **options)
        q = unbound.shard(call.qkv[0], 2)
        with pytest.raises(ValueError, match="on\\(mesh\\)"):
            sparseflash.attention(q, q[:, :2], q[:, :2], unbound)
        with pytest.raises(ValueError, match="rank"):
            context_parallel((1 - rank, world), chosen, n, **options).on()
        agree(cp := pickle.loads(pickle.dumps(unbound)).on(), call.on(cp), call.want, 1e-11, chosen)
    # one graph serves the plans of all batches
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(
        lambda q, plan: 2.0 * sparseflash.attention(q, q, q, plan) + q, backend=counter
    )
    for lengths in ((50, 150), (100, 60, 40), (200,), (7, 193)):
        cut = masks.documents(lengths)
        plan = context_parallel((rank, world), cut, n, heads=4, owner="contiguous").on()
        q = plan.shard(call.qkv[0], 2)
        whole = 2.0 * sparseflash.attention(*3 * [call.qkv[0]], cut) + call.qkv[0]
        assert close(compiled(q, plan), plan.shard(whole, 2), 1e-11)
    assert counter.frame_count <= 2, counter.frame_count
    with pytest.raises(ValueError, match="2, 2"):
        context_parallel((2, 2), mask, n)
    other = context_parallel((rank, world), masks.local(rank + 1), n, **options).on()
    with pytest.raises(ValueError, match=r"ranks \[1\]"):
        call.on(other)


def taken_gradients(module: nn.Module) -> list[torch.Tensor]:
    exact = [cast(torch.Tensor, p.grad) for p in module.parameters()]
    module.zero_grad()
    return exact


def agree_in_sum(module: nn.Module, exact: list[torch.Tensor]) -> None:
    """Each rank has the share of its own tokens."""
    for p, grad in zip(module.parameters(), exact, strict=True):
        dist.all_reduce(p.grad)
        assert p.grad is not None and close(p.grad, grad, 1e-9)


def layers(rank: int, world: int) -> None:
    """The layer with rotary positions."""
    n, mask = 256, masks.sliding(50)
    torch.manual_seed(0)
    layer = sparseflash.BlockSparseAttention(
        32, 4, kv_heads=2, mask=mask, rotary=sparseflash.Rotary()
    ).double()
    x = torch.randn(2, n, 32, dtype=torch.float64)
    want = layer(x)
    want.square().sum().backward()
    exact = taken_gradients(layer)
    layer.mask = context_parallel(
        None, mask, n, heads=4, kv_heads=2, block_size=SIZE, owner="zigzag"
    )
    found = layer(layer.mask.shard(x))
    assert close(layer.mask.unshard(found), want.detach(), 1e-11)
    found.square().sum().backward()
    agree_in_sum(layer, exact)


class Block(nn.Module):
    def __init__(self, mask: Any):
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(32), nn.Linear(32, 32)
        self.attention = sparseflash.BlockSparseAttention(
            32, 4, kv_heads=2, mask=mask, rotary=sparseflash.Rotary()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + checkpoint(self.attention, self.norm(x), use_reentrant=False)
        return x + self.mlp(x).relu()


def sharded_weights(rank: int, world: int) -> None:
    """Halves of a batch on one dimension of a mesh, tokens on the other, weights on both."""
    n, batch = 160, 4
    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("dp", "cp"))
    mask = masks.longformer(16, 1, (0, 1)) & masks.causal()
    cp = context_parallel(mesh["cp"], mask, n, heads=4, kv_heads=2, block_size=SIZE)

    def made(mask: Any) -> nn.Module:
        torch.manual_seed(0)
        layers = nn.Embedding(20, 32), Block(mask), Block(mask), nn.Linear(32, 20)
        return nn.Sequential(*layers).double()

    tokens = torch.randint(20, (batch, n + 1), generator=torch.Generator().manual_seed(1))
    one: Any = made(mask)
    F.cross_entropy(one(tokens[:, :-1]).mT, tokens[:, 1:]).backward()
    own = tokens.chunk(2)[mesh["dp"].get_local_rank()]
    x, y = cp.shard(own[:, :-1]), cp.shard(own[:, 1:])
    fsdp: Any = made(cp)
    for layer in (*fsdp[1:3], fsdp):
        fully_shard(layer, mesh=mesh["dp", "cp"])
    for model in (fsdp, DistributedDataParallel(made(cp))):
        loss = F.cross_entropy(model(x).mT, y, reduction="sum") / (batch * n)
        (world * loss).backward()  # both average over all ranks
        for p, exact in zip(model.parameters(), one.parameters(), strict=True):
            found = p.grad.full_tensor() if model is fsdp else p.grad
            assert close(found, exact.grad, 1e-9)


def models(rank: int, world: int) -> None:
    """A model of transformers with windows in some layers: logits, loss and gradients."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    from sparseflash.integrations.transformers import use

    n = 192
    config = Gemma3TextConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, head_dim=16,
        num_attention_heads=2, num_key_value_heads=1, sliding_window=40,
        layer_types=["sliding_attention", "full_attention"],
    )  # fmt: skip
    torch.manual_seed(0)
    model: Any = Gemma3ForCausalLM(config).double()
    model.set_attn_implementation("sdpa")
    ids = torch.randint(64, (1, n))
    labels = torch.cat([ids[:, 1:], torch.full((1, 1), -100)], 1)
    want = model(ids, labels=ids)
    want.loss.backward()
    exact = taken_gradients(model)
    cp = context_parallel(None, masks.causal(), n, heads=2, kv_heads=1, block_size=SIZE)
    use(model, context=cp)
    own = {"input_ids": cp.shard(ids), "position_ids": cp.positions()[None]}
    targets = cp.shard(labels)
    out = model(**own, labels=targets, shift_labels=targets, num_items_in_batch=n - 1)
    assert close(cp.unshard(out.logits), want.logits.detach(), 1e-9)
    loss = out.loss.detach().clone()
    dist.all_reduce(loss)
    assert close(loss, want.loss.detach(), 1e-9)
    out.loss.backward()
    agree_in_sum(model, exact)
    with pytest.raises(ValueError, match="padding, a"):
        model(**own, attention_mask=torch.arange(cp.tokens)[None] > 9)
    with pytest.raises(ValueError, match="position_ids"):
        model(own["input_ids"], position_ids=own["position_ids"] + 1)


def biased_models(rank: int, world: int) -> None:
    """T5's bias by distance is that of the whole sequence."""
    from transformers import T5Config, T5EncoderModel

    from sparseflash.integrations.transformers import use

    torch.manual_seed(0)
    config = T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=2, num_heads=2)
    model: Any = T5EncoderModel(config).double().eval()
    ids = torch.randint(64, (1, 192))
    model.set_attn_implementation("sdpa")
    want = model(ids).last_hidden_state
    cp = context_parallel(None, masks.dense(), 192, heads=2, kv_heads=2, block_size=SIZE)
    use(model, context=cp)
    found = model(cp.shard(ids)).last_hidden_state
    assert close(cp.unshard(found), want.detach(), 1e-9)
    (table,) = (p for name, p in model.named_parameters() if "relative" in name)
    (exact,) = torch.autograd.grad(want.square().sum(), table)
    (grad,) = torch.autograd.grad(found.square().sum(), table)
    dist.all_reduce(grad)
    assert close(grad, exact, 1e-9)


def several(rank: int, world: int) -> None:
    for body in (composed, refused, optional, planned_elsewhere, layers, models, biased_models):
        torch.compiler.reset()
        body(rank, world)


def test_composition_refusals_layers_and_models():
    pytest.importorskip("transformers")
    on_ranks(2, several)
