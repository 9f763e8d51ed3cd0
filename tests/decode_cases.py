"""Random decoding steps, and what float64 says of them."""

import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import masks
import sparseflash
from masks import BlockMask, Mask
from sparseflash.testing import make_qkv, oracle

PAGES = (16, 32, 48, 64, 128, 256)
HEAD_DIMS = (32, 40, 64, 80, 128, 192, 256)
NOWHERE = 2**30  # a page that does not exist


@dataclass(frozen=True)
class Step:
    """A decoding step; lengths: of the sequences, of n at most."""

    n_q: int
    n: int
    head_dim: int
    lengths: tuple[int, ...]
    mask: Mask | BlockMask | None = None
    heads: int = 4
    kv_heads: int = 2
    v_head_dim: int | None = None
    page: int = 0  # tokens of a page; 0: a contiguous cache
    starts: tuple[int, ...] | None = None
    splits: int | None = None
    scale: float | None = None
    dtype: torch.dtype = torch.float32
    seed: int = 0
    device: str = "cpu"
    layout: str = field(default="tokens first")  # of the cache in memory, or "heads first"

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, and k and v of a contiguous cache, NaN outside the starts and the lengths."""
        q, k, v = make_qkv(
            len(self.lengths), self.heads, self.n_q, self.n, self.head_dim, kv_heads=self.kv_heads,
            v_head_dim=self.v_head_dim, dtype=self.dtype, device=self.device, seed=self.seed,
        )  # fmt: skip
        outside = ~self.within().transpose(2, 3).to(self.device)
        k, v = (t.masked_fill(outside, float("nan")) for t in (k, v))
        if self.layout == "tokens first":
            q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v))
        return q, k, v

    def arguments(self) -> tuple[list[Tensor], dict[str, Any]]:
        """Those of `decode`, the mask apart, paged where the step is."""
        q, k, v = self.tensors()
        lengths = torch.tensor(self.lengths, dtype=torch.int32, device=self.device)
        options = {"lengths": lengths, "scale": self.scale, "splits": self.splits}
        if self.starts is not None:
            options["starts"] = torch.tensor(self.starts, device=self.device)
        if self.page:
            k, v, options["block_table"] = paged(k, v, self.lengths, self.page, self.seed)
            if self.layout == "heads first":
                k, v = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in (k, v))
        return [q, k, v], options

    def run(self, **options: Any) -> tuple[Tensor, Tensor]:
        (q, k, v), given = self.arguments()
        return sparseflash.decode(q, k, v, self.mask, return_lse=True, **(given | options))

    def exact(self) -> tuple[Tensor, Tensor]:
        """out and lse in float64."""
        q, k, v = (t.double().nan_to_num() for t in self.tensors())
        return oracle(q, k, v, self.allowed().to(q.device), self.scale)

    def within(self) -> Tensor:
        """Bool (B, 1, 1, n): the keys of each sequence."""
        ends = torch.tensor(self.lengths)[:, None, None, None]
        starts = torch.tensor(self.starts or (0,))[:, None, None, None]
        key = torch.arange(self.n)
        return (key >= starts) & (key < ends)

    def allowed(self) -> Tensor:
        """Bool (B, heads or 1, n_q, n): the rows of the last tokens, up to the lengths."""
        ends, within = torch.tensor(self.lengths)[:, None, None, None], self.within()
        if self.mask is None:
            return within.expand(-1, 1, self.n_q, -1)
        blocks = self.mask
        if isinstance(blocks, Mask):
            blocks = blocks.build(self.n, heads=self.heads if blocks.per_head else None)
        dense = torch.from_numpy(blocks.to_dense())
        if blocks.n_q != self.n:
            return dense & within
        dense = dense.repeat_interleave(self.heads // dense.shape[1] if len(dense[0]) > 1 else 1, 1)
        token = ends - self.n_q + torch.arange(self.n_q)[:, None]
        token = token.expand(-1, dense.shape[1], -1, self.n)
        rows = dense.expand(len(ends), -1, -1, -1).gather(2, token.clamp(min=0))
        return rows & within & (token >= 0)


def paged(
    k: Tensor, v: Tensor, lengths: tuple[int, ...], page: int, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """The same cache in pages (pages, page, heads, D) that lie anywhere, and its block table.

    Pages that no sequence uses hold NaN, and the table has wrong numbers beyond the lengths.
    """
    columns = -(-k.shape[2] // page)
    used = [-(-length // page) for length in lengths]
    free = list(range(sum(used) + 3))
    random.Random(seed).shuffle(free)
    table = torch.full((len(lengths), columns), NOWHERE, dtype=torch.int32)
    caches = [t.new_full((len(free), page, t.shape[1], t.shape[3]), float("nan")) for t in (k, v)]
    for b, count in enumerate(used):
        for j in range(count):
            table[b, j] = free.pop()
            for cache, t in zip(caches, (k, v), strict=True):
                tokens = t[b, :, j * page : (j + 1) * page].transpose(0, 1)
                cache[table[b, j], : len(tokens)] = tokens
    return caches[0], caches[1], table.to(k.device)


def random_mask(rng: random.Random, heads: int, n: int, n_q: int) -> Mask | BlockMask | None:
    """Masks of every form that `decode` takes, selections apart."""
    local = masks.local(rng.randrange(1, 90))
    mask = rng.choice(
        [
            None,
            masks.causal(),
            local & masks.causal(),
            local | masks.global_tokens(rng.randrange(1, 9)),
            masks.butterfly(16) & masks.causal(),
            masks.random_blocks(0.3, block=16),
            masks.diagonals((-rng.randrange(1, n),)),  # most queries see one key, or none
            masks.heads(*(masks.local(rng.randrange(80)) for _ in range(heads))),
        ]
    )
    if mask is None or rng.random() < 0.5:
        return mask
    block_size = rng.choice([(16, 16), (64, 32), (128, 128), (32, 48), (16, 256)])
    built = {"block_size": block_size, "heads": heads if mask.per_head else None}
    if n_q < n and rng.random() < 0.3:  # one row for each query
        rows = mask.build(n, **built).to_dense()[:, :, n - n_q :]
        return BlockMask.from_dense(rows, block_size)
    return mask.build(n, **built)


def random_step(seed: int, **options: Any) -> Step:
    rng = random.Random(seed)
    n_q, n = rng.choice([1, 1, 2, 3, 5, 8, 16]), rng.choice([40, 100, 129, 256, 300])
    kv_heads, group = rng.choice([1, 2]), rng.choice([1, 2, 4, 8])
    heads = kv_heads * group
    page = rng.choice([0, *PAGES])
    n = -(-n // page) * page if page else n
    lengths = tuple(
        rng.choice([0, 1, n_q, n, rng.randrange(n + 1)]) for _ in range(rng.choice([1, 2, 3]))
    )
    return Step(
        n_q, n, rng.choice(HEAD_DIMS), lengths, random_mask(rng, heads, n, n_q), heads, kv_heads,
        v_head_dim=rng.choice([None, None, 32, 64]), page=page,
        starts=rng.choice([None, tuple(rng.randrange(n + 1) for _ in lengths)]),
        splits=rng.choice([None, 1, 2, 3, 7, 20]), scale=rng.choice([None, 0.3]), seed=seed,
        layout=rng.choice(["tokens first", "heads first"]), **options,
    )  # fmt: skip
