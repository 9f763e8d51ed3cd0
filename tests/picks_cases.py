"""Attention to picked blocks against float64, in the interpreter and on a GPU."""

from typing import NamedTuple

import torch
from torch import Tensor

import sparseflash
from sparseflash import select
from sparseflash.testing import make_qkv, oracle, relative_error


class Case(NamedTuple):
    """lists: heads that pick; k: picks of a query."""

    heads: int
    kv_heads: int
    lists: int
    n_q: int
    n_k: int
    head_dim: int
    v_head_dim: int
    block: int
    k: int
    causal: bool = True
    dtype: torch.dtype = torch.float32
    batch: int = 2
    token_major: bool = False

    @property
    def blocks(self) -> int:
        return -(-self.n_k // self.block)


CASES = {
    "one list a key head": Case(4, 2, 2, 20, 20, 16, 16, 16, 2),
    "three heads to a list, other values": Case(6, 2, 2, 18, 18, 24, 40, 16, 2, batch=1),
    "two lists a key head, more keys": Case(4, 2, 4, 7, 60, 16, 16, 16, 3, batch=1),
    "each head": Case(4, 1, 4, 10, 35, 16, 16, 48, 1, batch=1),
    "not causal": Case(4, 1, 2, 12, 90, 16, 16, 48, 2, causal=False, batch=1),
    "more queries than keys": Case(2, 1, 1, 30, 20, 16, 16, 16, 2, batch=1),
    "half": Case(8, 1, 1, 20, 20, 16, 16, 16, 2, dtype=torch.float16, batch=1),
    "all blocks": Case(2, 2, 2, 17, 40, 16, 16, 16, 3, batch=1),
    # every tile has all of its keys, which descriptors copy where head dims are not padded
    "whole tiles": Case(4, 2, 2, 20, 48, 16, 32, 16, 2),
    "whole tiles, heads side by side": Case(4, 2, 4, 20, 48, 16, 32, 16, 2, token_major=True),
    "whole tiles, no descriptors": Case(2, 1, 1, 20, 48, 24, 24, 16, 2),
}

# with more queries for each block than a tile has, and groups that fill rows of it or leave some
GATHERED = {
    "one head, blocks of 256": Case(1, 1, 1, 150, 300, 16, 16, 256, 2, batch=1),
    "two heads to a list": Case(4, 1, 2, 61, 61, 24, 40, 32, 2, batch=1),
    "three heads, not causal": Case(3, 1, 1, 45, 70, 16, 16, 48, 2, causal=False, batch=1),
    "sixteen heads, half": Case(16, 1, 1, 9, 33, 16, 32, 16, 2, dtype=torch.float16, batch=1),
    "half, many queries": Case(2, 1, 2, 150, 130, 16, 16, 64, 3, dtype=torch.float16, batch=1),
    "wide heads, half": Case(2, 1, 2, 40, 40, 160, 16, 32, 1, dtype=torch.float16, batch=2),
    "one query": Case(2, 1, 2, 1, 50, 16, 16, 16, 4),
    "a batch of three": Case(2, 2, 2, 33, 33, 16, 16, 16, 2, batch=3),
}


def numbers(case: Case, seed: int, device: str = "cpu") -> Tensor:
    """Different random blocks for each query, a fifth of them -1; some queries have none."""
    generator = torch.Generator().manual_seed(seed)
    shape = case.batch, case.lists, case.n_q, case.blocks
    found = torch.rand(shape, generator=generator).argsort(-1)[..., : case.k]
    found[torch.rand(found.shape, generator=generator) < 0.2] = -1
    found[:, :, ::7] = -1
    return found.to(device)


def dense(case: Case, blocks: Tensor) -> Tensor:
    """bool (B, H, n_q, n_k) of such numbers."""
    at = torch.where(blocks < 0, case.blocks, blocks)
    taken = torch.zeros(*at.shape[:3], case.blocks + 1, dtype=torch.bool, device=at.device)
    taken = taken.scatter_(3, at, True)[..., : case.blocks]
    seen = taken.repeat_interleave(case.block, 3)[..., : case.n_k]
    if case.causal:
        place = torch.arange(case.n_k - case.n_q, case.n_k, device=at.device)
        seen = seen & (torch.arange(case.n_k, device=at.device) <= place[:, None])
    return seen.repeat_interleave(case.heads // case.lists, 1)


def check(case: Case, device: str, seed: int = 0) -> None:
    """Assert output, LSE and gradients, also those through the LSE."""
    qkv = make_qkv(
        case.batch, case.heads, case.n_q, case.n_k, case.head_dim, kv_heads=case.kv_heads,
        v_head_dim=case.v_head_dim, dtype=case.dtype, device=device, seed=seed, requires_grad=True,
    )  # fmt: skip
    if case.token_major:
        qkv = [t.detach().transpose(1, 2).contiguous().transpose(1, 2) for t in qkv]
        qkv = [t.requires_grad_() for t in qkv]
    blocks = numbers(case, seed, device)
    picks = select.Picks.of(blocks, case.block, case.n_k, causal=case.causal)
    exact = [t.detach().double().requires_grad_() for t in qkv]
    found = sparseflash.attention(*qkv, picks, return_lse=True, backend="triton")
    wanted = oracle(*exact, dense(case, blocks))
    empty = wanted[1] == -torch.inf
    assert torch.equal(found[1] == -torch.inf, empty) and not found[0][empty].any()
    generator = torch.Generator().manual_seed(seed + 1)
    dout = torch.randn(found[0].shape, generator=generator).to(device)
    dlse = torch.randn(found[1].shape, generator=generator).to(device).masked_fill(empty, 0)

    def gradients(results, inputs):
        out, lse = results
        outs = out, lse.masked_fill(empty, 0)
        given = dout.to(out.dtype), dlse.to(lse.dtype)
        return *outs, *torch.autograd.grad(outs, inputs, given)

    limit = 1e-5 if case.dtype == torch.float32 else 6 * torch.finfo(case.dtype).eps
    names = "out", "lse", "dq", "dk", "dv"
    pairs = zip(names, gradients(found, qkv), gradients(wanted, exact), strict=True)
    for name, got, want in pairs:
        error = relative_error(got, want)
        assert error < limit, f"{name}: relative error {error:.3g} above {limit:.3g}"
