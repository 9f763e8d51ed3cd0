"""The definition of every attention, dense and in float64, sequence by sequence."""

import torch
from torch import Tensor

from experiments.lra.models.attention import Attention

B, H, N, D = 2, 3, 75, 12  # 75 divides by no window, bucket or cluster of the tests


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
            out = softmax_oracle(qb, kb, vb, allowed[name] & ((j <= i) | (not attention.causal)))
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
        exponents = x @ attention.projection.T
        top = exponents.detach().amax(axes, keepdim=True)
        return (exponents - x.square().sum(-1, keepdim=True) / 2 - top).exp() + attention.eps

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
        scores = q[chunk] @ k[keys].mT * D**-0.5
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
