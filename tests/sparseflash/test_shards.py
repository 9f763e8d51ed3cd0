"""Tensor parallelism and DTensors, on two processes of this machine."""

import copy

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import masks
import sparseflash
from sparseflash import BlockSparseAttention, Rotary, attention
from tests.processes import on_ranks

MASK = masks.local(9) | masks.global_tokens(2)
PER_HEAD = masks.heads(masks.local(3), masks.dense(), masks.causal(), masks.local(8))


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def gradients(out, inputs):
    weight = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape)
    return torch.autograd.grad((full(out) * weight).sum(), inputs)


def same(found, wanted):
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(full(ours), theirs)


def check_layer(mesh, local=True, heads=4, **options):
    """Output and gradients of a layer that is split by heads are those of the whole layer."""
    torch.manual_seed(0)
    whole = BlockSparseAttention(24, heads, dtype=torch.float64, **options)
    x = torch.randn(2, 40, 24, dtype=torch.float64, requires_grad=True)
    split = copy.deepcopy(whole)
    columns = ColwiseParallel(use_local_output=local)
    plan = {"q": columns, "k": columns, "v": columns, "out": RowwiseParallel()}
    parallelize_module(split, mesh, plan)
    out, wanted = split(x), whole(x)
    same([out], [wanted])
    same(gradients(out, [x, *split.parameters()]), gradients(wanted, [x, *whole.parameters()]))


def check_attention(mesh, placement, kept, mask=MASK, score=None, **options):
    """Results and gradients of DTensors are those of one process."""
    torch.manual_seed(0)
    q = torch.randn(4, 4, 40, 8, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(4, 2, 40, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    sink = torch.randn(4, dtype=torch.float64, requires_grad=True)
    leaves = [q, k, v, sink]
    shared = [distribute_tensor(t, mesh, [placement]) for t in leaves[:3]]
    options |= {"return_lse": True, "sink": sink}
    if score is not None:
        leaves.append(torch.randn(4, 40, dtype=torch.float64, requires_grad=True))
        options["score"] = score(t=leaves[4])
    out, lse = attention(*shared, mask, **options)
    wanted = attention(*leaves[:3], mask, **options)
    assert out.placements == lse.placements == (kept,), out.placements
    same([out, lse], wanted)
    same(gradients(out, [*shared, *leaves[3:]]), gradients(wanted[0], leaves))


def ranks(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2,))
    check_layer(mesh, mask=MASK)
    check_layer(mesh, mask=MASK, kv_heads=2, rotary=Rotary())
    check_layer(mesh, local=False, mask=PER_HEAD)
    for local, options, named in (
        (True, {"kv_heads": 1, "head_dim": 6}, "1 key heads of 6"),
        (True, {"mask": PER_HEAD}, "use_local_output=False"),
        (True, {"dropout": 0.1}, "use_local_output=False"),
    ):
        try:
            check_layer(mesh, local, **options)
        except ValueError as error:
            assert named in str(error), error
        else:
            raise AssertionError(f"{options} ran")
    lengths = [40, 13, 0, 25]
    check_attention(mesh, Shard(0), Shard(0), lengths=lengths)
    check_attention(mesh, Shard(1), Shard(1), None)
    torch.manual_seed(rank)  # the ranks agree on a seed
    q = distribute_tensor(torch.ones(2, 2, 40, 8), mesh, [Shard(0)])
    out = full(attention(q, q, q, dropout_p=0.5))
    first = out.clone()
    torch.distributed.broadcast(first, 0)
    assert torch.equal(first, out) and not torch.equal(out, torch.ones_like(out))
    with pytest.raises(ValueError, match="k is not: distribute k as q is"):
        attention(q, q.to_local(), q)
    check_attention(mesh, Shard(1), Shard(1), lengths=torch.tensor(lengths))
    check_attention(mesh, Shard(2), Replicate())
    check_attention(mesh, Shard(1), Replicate(), PER_HEAD)
    check_attention(mesh, Shard(0), Replicate(), dropout_p=0.3, seed=5)
    of_keys, of_heads = (
        sparseflash.score(lambda s, q, k, t: s * torch.exp(t[q % 4, k])),
        sparseflash.score(lambda s, h, k, t: s + t[h, k]),
    )
    check_attention(mesh, Shard(1), Shard(1), score=of_keys)
    check_attention(mesh, Shard(1), Replicate(), score=of_heads)
    check_attention(mesh, Shard(0), Shard(0), score=of_heads)


def test_two_processes_have_the_results_of_one():
    on_ranks(2, ranks)
