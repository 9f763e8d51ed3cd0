"""Attention of q, k and v in one tensor beside that of its parts, on any device."""

import torch
from torch import Tensor

from sparseflash import attention
from sparseflash.attention import attention_of_qkv
from sparseflash.ops import qkv as qkv_ops
from sparseflash.ops.qkv import call_qkv, parts
from sparseflash.terms import term_options


def gradients(out: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weight = torch.linspace(-1, 2, out.numel(), device=out.device).view(out.shape)
    return torch.autograd.grad((out * weight).sum(), inputs)


def check_operator(
    monkeypatch, backend: str, qkv: Tensor, kv_heads: int, mask, *, dropout_p=0.0,
    deterministic=True, in_place: bool, exact: bool = True,
) -> None:  # fmt: skip
    """Results and gradients are those of the parts; in_place: whether the kernels write them."""
    run, seen = qkv_ops.run_backward, []

    def watched(plan, dout, dlse, saved, schedule):
        found = run(plan, dout, dlse, saved, schedule)
        seen.append(all(part is place for part, place in zip(found, saved.room, strict=False)))
        return found

    monkeypatch.setattr(qkv_ops, "run_backward", watched)
    seed = torch.tensor([7], device=qkv.device) if dropout_p else None
    qkv = qkv.detach().requires_grad_()
    options = {"dropout_p": dropout_p, "deterministic": deterministic, "backend": backend}
    call = None, *options.values(), *term_options(None), True
    for _ in range(2):  # the second call repeats the launches of the first
        found = call_qkv(qkv, kv_heads, "" if mask is None else mask.key, None, seed, call)
        wanted = attention(
            *parts(qkv, kv_heads), mask, seed=seed, return_lse=True, return_max_scores=True,
            **options,
        )  # fmt: skip
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(ours, theirs)
        (ours,), (theirs,) = gradients(found.out, qkv), gradients(wanted[0], qkv)
        assert ours.is_contiguous() and ours.isfinite().all() and ours.any()
        if exact:
            assert torch.equal(ours, theirs)
        else:
            assert (ours - theirs).float().norm() < 1e-3 * theirs.float().norm()
    assert seen == [in_place] * 2


class Layer(torch.nn.Module):
    """`attention_of_qkv` as a layer has it: behind a matrix product."""

    def __init__(self, heads: int, kv_heads: int, head_dim: int, mask, **options):
        super().__init__()
        self.qkv = torch.nn.Linear(16, (heads + 2 * kv_heads) * head_dim)
        self.head_dim, self.call = head_dim, ((kv_heads, mask), options)

    def forward(self, x: Tensor) -> Tensor:
        arguments, options = self.call
        return attention_of_qkv(
            self.qkv(x).unflatten(2, (-1, self.head_dim)), *arguments, **options
        )
