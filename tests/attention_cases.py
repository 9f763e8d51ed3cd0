"""Random attention problems, and their check against the float64 oracle: output, LSE, gradients."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import masks
import sparseflash
from sparseflash.backends.registry import BACKENDS
from sparseflash.dropout import keep_mask, keep_scale
from sparseflash.schedule.blocks import Schedule, schedule_for
from sparseflash.testing import TOLERANCE, assert_close, logits, oracle, relative_error
from tests.problems import problem_of, refusal

INTERPRETER_LENGTHS = (1, 16, 63, 100, 130)
GPU_LENGTHS = (1, 63, 100, 257, 512, 1000)
HEAD_DIMS = (4, 8, 16, 24, 32, 40, 64, 80, 128)
DTYPES = (torch.float32, torch.float16, torch.bfloat16)
LOW = DTYPES[1:]


@dataclass(frozen=True)
class Case:
    n_q: int
    n_k: int
    head_dim: int
    dtype: torch.dtype = torch.float32
    batch: int = 1
    heads: int = 2
    kv_heads: int = 2
    mask: masks.Mask | None = None
    block_size: tuple[int, int] = (128, 128)
    dropout_p: float = 0.0
    lse_gradient: bool = True
    token_major: bool = False  # memory as (batch, length, heads, head dim)
    scale: float | None = None
    seed: int = 0
    v_head_dim: int | None = None  # that of q and k
    deterministic: bool = False
    sink: bool = False
    sink_mean: float = 0.0
    max_scores: bool = False  # whether the row maxima are checked too
    softcap: float = 0.0  # 0: none

    @property
    def width(self) -> int:
        """Head dim of v, out and their gradients."""
        return self.v_head_dim or self.head_dim

    @property
    def score(self) -> sparseflash.Score | None:
        return sparseflash.score_rules.softcap(self.softcap) if self.softcap else None

    def capped(self, scores: Tensor) -> Tensor:
        return self.softcap * (scores / self.softcap).tanh() if self.softcap else scores


def random_array(rng: random.Random, shape: tuple[int, ...], block: tuple[int, int]) -> np.ndarray:
    """Bool array whose blocks are empty, full or random, with an empty row and an empty column."""
    numbers = np.random.default_rng(rng.randrange(2**32))
    *outer, n_q, n_k = shape
    kinds = numbers.integers(0, 3, (*outer, -(-n_q // block[0]), -(-n_k // block[1])))
    kinds = kinds.repeat(block[0], -2).repeat(block[1], -1)[..., :n_q, :n_k]
    array = (kinds == 2) | ((kinds == 1) & (numbers.random(shape) < 0.3))
    array[..., n_q // 3, :] = False
    array[..., :, n_k // 2] = False
    return array


def random_mask(rng: random.Random, case: Case) -> masks.Mask | None:
    kind = rng.randrange(8)
    if kind == 0:
        return None
    if kind == 1:
        return masks.causal(align=rng.choice(["top_left", "bottom_right"]))
    if kind == 2:
        return masks.local(rng.randrange(60), rng.randrange(60)) | masks.global_tokens(
            rng.randrange(20)
        )
    if kind == 3:
        return (masks.butterfly(16) | masks.sliding(20)) & masks.causal()
    if kind == 4:
        return masks.random_blocks(
            0.4, block=32, seed=rng.randrange(99), per_head=rng.random() < 0.5
        )
    outer = rng.choice(
        [(), (case.heads,), (case.batch, case.heads), (case.batch, 1), (1, case.heads)]
    )
    return masks.mask_from(random_array(rng, (*outer, case.n_q, case.n_k), case.block_size))


def random_case(
    seed: int, lengths: tuple[int, ...], head_dims: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
) -> Case:
    rng = random.Random(seed)
    n_q = rng.choice(lengths)
    kv_heads = rng.choice([1, 2])
    case = Case(
        n_q=n_q,
        n_k=rng.choice([n_q, n_q, rng.choice(lengths)]),
        head_dim=rng.choice(head_dims),
        dtype=rng.choice(dtypes),
        batch=rng.choice([1, 2]),
        heads=kv_heads * rng.choice([1, 1, 2, 3]),
        kv_heads=kv_heads,
        block_size=(rng.choice([16, 32, 48, 64, 128]), rng.choice([16, 32, 48, 64, 128])),
        dropout_p=rng.choice([0.0, 0.0, 0.3]),
        lse_gradient=rng.random() < 0.5,
        token_major=rng.random() < 0.5,
        scale=rng.choice([None, None, 0.3]),
        seed=seed,
        max_scores=seed % 2 == 0,
    )
    return replace(case, mask=random_mask(rng, case))


def skip_what_is_refused(case: Case, backend: str, refused: str | None) -> None:
    """Skip a case that the kernels for Hopper leave to the others; all else must not be refused."""
    if refused is None:
        return
    beyond_tma = case.head_dim % 8 or case.width % 8  # strides of no multiple of 16 bytes
    other_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)
    by_design = case.dtype == torch.float32 or beyond_tma or other_gpu
    assert backend == "hopper" and by_design, f"{backend} refuses {case}: {refused}"
    pytest.skip(refused)


def plain(
    q, k, v, mask: Tensor | None, scale: float, keep: Tensor | None, dropout_p: float,
    sink: Tensor | None, score: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention by eager torch in the dtype of q: what a low-precision result is compared to."""
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    scores = score((q @ k.transpose(-1, -2)) * scale)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
        empty = ~mask.any(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
    lse = scores.float().logsumexp(-1)
    p = scores.softmax(-1)
    if mask is not None:
        p = p.masked_fill(empty, 0.0)
        lse = lse.masked_fill(empty.squeeze(-1), float("-inf"))
    if sink is not None:
        total = torch.logaddexp(lse, sink.float()[:, None])
        p, lse = p * (lse - total).exp().to(p.dtype).unsqueeze(-1), total
    if keep is not None:
        p = p * keep * keep_scale(dropout_p)
    return p @ v, lse


def draw_sink(case: Case, device: str) -> Tensor | None:
    """The sinks, in the dtype of q, or None."""
    generator = torch.Generator().manual_seed(case.seed + 1)
    sink = torch.randn(case.heads, generator=generator) + case.sink_mean
    return sink.to(device, case.dtype) if case.sink else None


def gradients(out, lse, dout, dlse, inputs) -> tuple[Tensor, ...]:
    """Gradients of out . dout + lse . dlse; rows with lse = -inf have none of their own."""
    loss = (out * dout.to(out.dtype)).sum()
    if dlse is not None:
        finite = torch.isfinite(lse)
        loss = loss + (lse.masked_fill(~finite, 0.0) * dlse.to(lse.dtype)).sum()
    return torch.autograd.grad(loss, inputs)


def draw(case: Case, device: str) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, Tensor | None]:
    """q, k, v in the case's layout, dout, and dlse or None."""
    generator = torch.Generator().manual_seed(case.seed)

    def normal(heads: int, length: int, head_dim: int) -> Tensor:
        x = torch.randn(case.batch, heads, length, head_dim, generator=generator)
        x = x.to(device, case.dtype)
        return x.transpose(1, 2).contiguous().transpose(1, 2) if case.token_major else x

    qkv = (
        normal(case.heads, case.n_q, case.head_dim),
        normal(case.kv_heads, case.n_k, case.head_dim),
        normal(case.kv_heads, case.n_k, case.width),
    )
    dout = normal(case.heads, case.n_q, case.width)
    dlse = torch.randn(case.batch, case.heads, case.n_q, generator=generator).to(device)
    return qkv, dout, dlse if case.lse_gradient else None


def build(case: Case, device: str) -> tuple[masks.BlockMask | None, Tensor | None]:
    """The case's mask as blocks and dense (B, Hq, N_q, N_k), or twice None."""
    if case.mask is None:
        return None, None
    heads = case.heads if case.mask.per_head else None
    blocks = case.mask.build(case.n_q, case.n_k, case.block_size, heads=heads)
    dense = torch.from_numpy(blocks.to_dense()).to(device)
    return blocks, dense.expand(case.batch, case.heads, -1, -1)


def schedule_of(case: Case, device: str = "cuda") -> Schedule | None:
    """The schedule of the case's mask, or None."""
    blocks, _ = build(case, device)
    extents = case.n_q, case.n_k, case.batch, case.heads
    return None if blocks is None else schedule_for(blocks, *extents, device)


def check_maxima(
    maxima: Tensor, qkv: tuple[Tensor, ...], dense: Tensor | None, scale: float, score: Any
) -> None:
    """Assert that these are the largest logits: in every dtype as near as float32 products are."""
    wanted = logits(*qkv[:2], dense, scale, score).amax(-1)
    assert not maxima.requires_grad
    error, limit = relative_error(maxima, wanted), TOLERANCE.get(maxima.dtype, 0.0)
    assert error <= limit, f"max_scores: relative error {error:.3g} above {limit:.3g}"


def check(case: Case, backend: str, device: str, slack: float = 1.0) -> None:
    """Assert that a backend computes the case: output, LSE and the gradients of q, k and v.

    slack: of 16-bit results, how often the error of plain torch in that precision they may have:
    with few numbers in them one error can be the larger by chance.
    """
    qkv, dout, dlse = draw(case, device)
    sink = draw_sink(case, device)
    learned = [] if sink is None else [sink]
    blocks, dense = build(case, device)
    problem = problem_of(*qkv, blocks, dropout_p=case.dropout_p, deterministic=case.deterministic)
    if BACKENDS[backend].unsupported(problem, "forward") is None and refusal(backend, problem):
        # hopper has no deterministic backward there
        assert max(case.head_dim, case.width) > 128 and case.deterministic
        backend = "auto"  # takes its forward
    else:
        skip_what_is_refused(case, backend, refusal(backend, problem))
    seed = torch.tensor([case.seed + 2**40], device=device)
    keep = None
    if case.dropout_p:
        keep = keep_mask(seed, case.batch, case.heads, case.n_q, case.n_k, case.dropout_p)
    scale = case.scale or case.head_dim**-0.5

    def run(function, inputs):
        inputs = [
            t.detach().clone(memory_format=torch.preserve_format).requires_grad_()
            for t in (*inputs, *(sink.to(inputs[0].dtype) for sink in learned))
        ]
        own = inputs[3] if learned else None
        out, lse, *maxima = function(*inputs[:3], own)
        return out, lse, *gradients(out, lse, dout, dlse, inputs), *maxima

    what = dense, scale, keep, case.dropout_p
    expected, same = (
        run(lambda *given, f=f: f(*given[:3], *what, given[3], case.capped), inputs)
        for f, inputs in ((oracle, [t.double() for t in qkv]), (plain, qkv))
    )
    options: dict[str, Any] = {
        "scale": scale, "dropout_p": case.dropout_p, "seed": seed, "backend": backend,
        "return_lse": True, "return_max_scores": case.max_scores, "score": case.score,
        "deterministic": case.deterministic,
    }  # fmt: skip
    actual = run(
        lambda *given: sparseflash.attention(*given[:3], blocks, sink=given[3], **options), qkv
    )
    if case.max_scores:
        *actual, maxima = actual
        check_maxima(maxima, qkv, dense, scale, case.capped)
    # at most one key for every query
    lone = case.n_k == 1 or (dense is not None and bool((dense.sum(-1) <= 1).all()))
    for name, got, want, plain_result in zip(
        ("out", "lse", "dq", "dk", "dv", "sink"), actual, expected, same, strict=False
    ):
        if name in ("dq", "dk") and lone:
            # a lone key has p = 1: dS = dP - rowsum(out * dout) cancels to the rounding of its
            # terms, of size sqrt(D)
            terms = case.n_q * case.heads // case.kv_heads if name == "dk" else 1
            limit = 4 * torch.finfo(case.dtype).eps * scale * (case.head_dim * terms) ** 0.5
            rms = (got.double() - want).square().mean().sqrt().item()
            assert rms < limit, f"{name}: root mean square error {rms:.3g} above {limit:.3g}"
        elif name == "sink":
            # a sum of p out dout into few numbers, which may cancel to the rounding of its terms
            p = (learned[0].double()[:, None] - expected[1]).exp()
            terms = p[..., None] * expected[0] * dout.double()
            size = terms.square().sum((0, 2, 3)).sqrt() + want.abs()
            allowed = TOLERANCE.get(case.dtype, slack * torch.finfo(case.dtype).eps)
            least = torch.finfo(case.dtype)  # what the dtype cannot tell from 0
            limit = allowed * size.norm().item() + least.smallest_normal * least.eps
            error = (got.double() - want).norm().item()
            assert error <= limit, f"sink: error {error:.3g} above {limit:.3g}"
        elif case.dtype in LOW and slack > 1:
            error = relative_error(got, want)
            limit = slack * (relative_error(plain_result, want) + torch.finfo(got.dtype).eps)
            assert error < limit, f"{name}: relative error {error:.3g} above {limit:.3g}"
        else:
            assert_close(got, want, plain_result, name=name)
