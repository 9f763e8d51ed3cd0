"""FlashAttention-4 (flash_attn.cute of Dao-AILab/flash-attention), where it is installed.

Its forward walks the key blocks of a query block, its backward the query blocks of a key block.
Both have a list of partial blocks and one of full blocks. As in `masks`, a block at a ragged end is
full when all of its existing tokens are allowed.
"""

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from experiments.bench.cases import CAUSAL, Case
from experiments.bench.provider import Attention, Provider, block_lists
from masks.block_mask import BlockMask
from masks.tiles import FULL

os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")  # compile once a machine


@dataclass(frozen=True)
class FlashAttention4(Provider):
    """Block lists by `to_fa4`; partial blocks look up their bits, `causal` has its own kernel.

    form: "window" and "varlen" are its own arguments for windows and for packed documents, in place
        of block lists. They concern only the cases with such masks.
    """

    form: str = "blocks"

    package, modules = "flash-attn-4", ("flash_attn.cute.interface",)
    install = "pip install flash-attn-4==4.0.0b36 'nvidia-cutlass-dsl[cu13]==4.7.1'"

    def concerns(self, case: Case) -> bool:
        if self.form == "window":
            return case.window is not None and not case.causal
        return self.form == "blocks" or case.documents is not None

    def unsupported(self, case: Case, device: torch.device, direction: str) -> str | None:
        if device.type != "cuda":
            return f"needs a CUDA device, not {device}"
        if case.dtype not in ("bfloat16", "float16"):
            return f"takes bfloat16 and float16, not {case.dtype}"
        if self.form == "varlen" and case.layout != "token_major":
            return (
                f"joins the documents of all batch entries: layout=token_major, not {case.layout}"
            )
        return self.missing()

    def prepare(self, case: Case, device: torch.device, **more: Any) -> Attention:
        """`Provider.prepare`; more: arguments of `flash_attn_func`, such as score_mod."""
        interface = importlib.import_module("flash_attn.cute.interface")
        arguments: dict[str, Any] = {"deterministic": False, **more}
        if self.form == "varlen":
            attend = interface.flash_attn_varlen_func
            arguments |= varlen_arguments(case, device)
        else:
            attend = interface.flash_attn_func
            if self.form == "window":
                arguments["window_size"] = case.window
            elif case.causal:
                arguments["causal"] = True
            elif case.blocks is not None:
                arguments |= block_arguments(case, device)

        def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            batch = q.shape[0]
            inputs = [t.transpose(1, 2) for t in (q, k, v)]
            if self.form == "varlen":
                inputs = [t.flatten(0, 1) for t in inputs]
            found = attend(*inputs, **arguments)
            out = found[0] if isinstance(found, tuple) else found
            if self.form == "varlen":
                out = out.unflatten(0, (batch, -1))
            return out.transpose(1, 2)

        return run


def varlen_arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """Return what `flash_attn_varlen_func` takes for packed documents."""
    assert case.documents is not None
    lengths = torch.tensor(case.documents * case.batch, dtype=torch.int32)
    ends = torch.nn.functional.pad(lengths.cumsum(0, dtype=torch.int32), (1, 0)).to(device)
    longest = max(case.documents)
    return {
        "cu_seqlens_q": ends,
        "cu_seqlens_k": ends,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": CAUSAL in case.mask,
    }


def block_arguments(case: Case, device: torch.device) -> dict[str, Any]:
    """Return what `flash_attn_func` takes for the mask of a case."""
    assert case.blocks is not None
    tensors = importlib.import_module("flash_attn.cute.block_sparsity").BlockSparseTensorsTorch
    found = to_fa4(case.blocks, device)
    arguments: dict[str, Any] = {"block_sparse_tensors": tensors(**found.forward)}
    arguments["block_sparse_tensors_bwd"] = tensors(**found.backward)
    if found.aux_tensors is not None:
        codes, bits = found.aux_tensors
        # An empty tile and a full one in front: then every code is an index.
        ends = torch.stack([torch.zeros_like(bits[0]), torch.full_like(bits[0], -1)])
        arguments["aux_tensors"] = [codes + 2, torch.cat([ends, bits])]
        per_batch, per_head = case.blocks.batch > 1, case.blocks.heads > 1
        arguments["mask_mod"] = bit_lookup(*case.blocks.block_size, per_batch, per_head)
    return arguments


@lru_cache
def bit_lookup(block_q: int, block_k: int, per_batch: bool, per_head: bool) -> Callable[..., Any]:
    """Return the mask_mod that looks up the bit of one (query, key) in the `aux_tensors`."""
    import cutlass  # pyright: ignore[reportMissingImports]
    import cutlass.cute as cute  # pyright: ignore[reportMissingImports]
    from flash_attn.cute import utils  # pyright: ignore[reportMissingImports]

    @cute.jit
    def lookup(batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        code, bits = aux_tensors[0], aux_tensors[1]
        q, k = q_idx[0], kv_idx[0]
        b = batch[0] if cutlass.const_expr(per_batch) else 0
        h = head[0] if cutlass.const_expr(per_head) else 0
        tile = code[b, h, q // block_q, k // block_k]
        word = bits[tile, q % block_q, k % block_k // 32]
        bit = (word >> (k % block_k % 32)) & 1
        return utils.scalar_to_ssa(bit, cutlass.Int32) == utils.scalar_to_ssa(1, cutlass.Int32)

    return lookup


def score_mod(rule: Callable[..., Any]) -> Callable[..., Any]:
    """Return the score_mod of a rule(math, s, b, h, q, k, *tables), whose tables are `aux_tensors`;
    math has tanh, abs and clip of one number. It has no backward.
    """
    import cutlass  # pyright: ignore[reportMissingImports]
    import cutlass.cute as cute  # pyright: ignore[reportMissingImports]
    from flash_attn.cute import utils  # pyright: ignore[reportMissingImports]

    math = SimpleNamespace(
        tanh=cute.math.tanh, abs=lambda x: cutlass.max(x, -x),
        clip=lambda x, low, high: cutlass.min(cutlass.max(x, low), high),
    )  # fmt: skip

    def value(tables, *numbers):  # runs as it is, when `apply` is compiled
        return rule(math, *numbers, *(tables or ()))

    @cute.jit
    def apply(score, batch, head, q_idx, kv_idx, seqlen_info, aux_tensors):
        found = value(aux_tensors, score[0], batch[0], head[0], q_idx[0], kv_idx[0])
        return utils.scalar_to_ssa(found, cutlass.Float32)

    apply.__vec_size__ = 1
    return apply


# ---- lists of blocks


class Fa4Mask(NamedTuple):
    """What `flash_attn_func` takes for one mask.

    `forward` is its block_sparse_tensors, `backward` its block_sparse_tensors_bwd, as the arguments
    of `flash_attn.cute.block_sparsity.BlockSparseTensorsTorch`: counts int32 (batch or 1, heads or
    1, lines), and lists int32 (..., lines, longest list), with 0 after the last entry. Lines are
    query blocks forward and key blocks backward. Partial blocks also need a mask_mod, a CuTe
    function. It can look up `aux_tensors`, which is None where no block is partial.
    """

    forward: dict[str, Any]
    backward: dict[str, Any]
    aux_tensors: list[Any] | None  # [code int32 (B, H, rows, cols), bits int32 (T, block_q, words)]


def to_fa4(blocks: BlockMask, device: Any = None) -> Fa4Mask:
    """Return block lists for FlashAttention-4, compact: as wide as the longest list.

    FlashAttention-4 evaluates partial blocks by a mask_mod written in CuTe. For any mask it can be:

        tile = code[b, h, q // block_q, k // block_k]      (b, h: 0 where that extent is 1)
        allowed = tile == -1 or tile >= 0 and
                  bits[tile, q % block_q, k % block_k // 32] >> (k % block_k % 32) & 1

    with code and bits the two `aux_tensors`. A formula of the pattern works as well. On an H100,
    FlashAttention-4 needs blocks of 128 x 128 for head dimensions up to 128. Its own type is
    `BlockSparseTensorsTorch(**mask.forward)`.
    """
    codes = torch.from_numpy(blocks.codes()).to(device)
    names = ("mask_block_cnt", "mask_block_idx", "full_block_cnt", "full_block_idx")
    forward, backward = (
        dict(zip(names, (*block_lists(lines >= 0), *block_lists(lines == FULL)), strict=True))
        | {"block_size": blocks.block_size}
        for lines in (codes, codes.mT)
    )
    aux = None
    if len(blocks.bits):
        aux = [codes, torch.from_numpy(blocks.bits.view(np.int32).copy()).to(device)]
    return Fa4Mask(forward, backward, aux)
