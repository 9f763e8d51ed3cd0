"""The arguments of the Hopper forward, by name: all warps of a program get them."""

import triton.language as tl
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper.tma import tensor_descriptor

from sparseflash.kernels.hopper.common import fields


@fields
class Descriptors:
    """For TMA; all of (B, H, N, D)."""

    q: tensor_descriptor
    k: tensor_descriptor
    v: tensor_descriptor
    out: tensor_descriptor


@fields
class Buffers:
    """Shared memory. A ring has its places along the first axis."""

    q: gl.shared_memory_descriptor  # [Q_STAGES * CONSUMERS, 64, max(BLOCK_D, BLOCK_DV)]; also O
    k: gl.shared_memory_descriptor  # [K_STAGES, BLOCK_N, BLOCK_D]
    v: gl.shared_memory_descriptor  # [V_STAGES, BLOCK_N, BLOCK_DV]
    record: gl.shared_memory_descriptor  # [4 * RECORD, 1]: the work to do


@fields
class Barriers:
    """A place is full once its copy has arrived, and empty once it has been read."""

    q_full: gl.shared_memory_descriptor
    q_empty: gl.shared_memory_descriptor
    k_full: gl.shared_memory_descriptor
    k_empty: gl.shared_memory_descriptor
    v_full: gl.shared_memory_descriptor  # with PAIRS those of K: V of a block comes with K of the
    v_empty: gl.shared_memory_descriptor  # next one
    out_full: gl.shared_memory_descriptor  # O stands in the place of Q
    record_full: gl.shared_memory_descriptor
    record_go: gl.shared_memory_descriptor  # the next tile may be claimed


@fields
class Forward:
    descs: Descriptors
    bufs: Buffers
    bars: Barriers
    # the tile lists; see sparseflash/schedule
    items: gl.tensor  # int32 (list_batch * list_heads * n_items, 8): TILE to PART of a tile
    idx: gl.tensor  # int32: the mask blocks of an entry
    bit: gl.tensor  # int32: the bit tile of an entry
    bits: gl.tensor  # int32: bit tiles
    n_items: gl.tensor  # of a batch x head
    n_long: gl.tensor  # of these, the ones that run before all others
    list_batch: gl.tensor  # 1: all batch entries have the same lists
    list_heads: gl.tensor  # likewise
    # tensors, and what describes them
    out: gl.tensor  # (B, H, N_q, D_v) with strides
    lse: gl.tensor  # float32 (B * H, N_q)
    counter: gl.tensor  # int32 (2,): tiles claimed, programs done
    seed: gl.tensor | gl.constexpr  # of dropout, or None
    threshold: gl.tensor
    keep_scale: gl.tensor  # 1 / (1 - p)
    sink: gl.tensor | gl.constexpr  # float32 (H,), or None
    max_scores: gl.tensor | gl.constexpr  # float32 (B * H, N_q), or None
    stride_b: gl.tensor
    stride_h: gl.tensor
    stride_n: gl.tensor
    part_out: gl.tensor  # float32 (B * H, n_parts, BLOCK_M, BLOCK_DV)
    part_lse: gl.tensor  # float32 (B * H, n_parts, BLOCK_M)
    part_max: gl.tensor | gl.constexpr  # likewise, or None
    n_parts: gl.tensor
    scale_log2: gl.tensor
    n_q: gl.tensor
    dim_v: gl.tensor
    heads: gl.tensor
    group: gl.tensor  # query heads to a key head
    n_bh: gl.tensor  # B * H / HEADS
    together: gl.tensor  # heads that run a tile one after the other
    # what the kernel is compiled for
    CONSUMERS: gl.constexpr
    HEADS: gl.constexpr  # query heads that share a tile
    PACK: gl.constexpr  # heads among the 64 rows of a consumer, BLOCK_M queries of each
    BLOCK_M: gl.constexpr  # queries of a tile: 64 * CONSUMERS / HEADS
    BLOCK_N: gl.constexpr  # keys of a tile
    BLOCK_D: gl.constexpr  # head dims, padded
    BLOCK_DV: gl.constexpr
    COLUMNS: gl.constexpr  # what is multiplied of them
    COLUMNS_V: gl.constexpr
    Q_STAGES: gl.constexpr
    K_STAGES: gl.constexpr
    V_STAGES: gl.constexpr
    PARTIAL: gl.constexpr  # there are partial blocks
    LOOPS: gl.constexpr  # two: partial blocks have a loop of their own
    DROPOUT: gl.constexpr
    SPLIT: gl.constexpr  # some tiles are split along the keys
    DRAIN: gl.constexpr  # the pipeline ends with every tile
    PAIRS: gl.constexpr  # K of a block and V of the one before share their barriers
    KEEP_Q: gl.constexpr  # Q stays in registers for a tile
    SKIP: gl.constexpr  # warps jump over multiplications by factors of 1
    # a score
    score_args: tl.tuple | gl.constexpr  # of the function, then N_q and N_k; None without one
    SCORE: gl.constexpr  # a function of `score.by_triton`, or None
    NUMBERS: gl.constexpr  # likewise
    BOUNDED: gl.constexpr  # the logits need no maxima
