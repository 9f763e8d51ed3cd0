"""The products of a block of the Hopper forward, and what stands in shared memory for them."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from sparseflash.kernels.hopper.columns import start_scores, start_scores_of, start_sums
from sparseflash.kernels.hopper.common import accumulator


@gluon.jit
def start_qk(f, q, g):
    """S = Q K^T of block g, asynchronous; q: in registers with KEEP_Q, else `shared_rows`."""
    k = f.bufs.k.index(g % f.K_STAGES)  # [BLOCK_N, BLOCK_D]
    zeros = gl.zeros([64, f.BLOCK_N], gl.float32, accumulator(f.BLOCK_N))
    if f.KEEP_Q:
        return start_scores_of(q, k, zeros, False)  # [64, BLOCK_N]
    elif f.P_SHARED:
        return start_scores_of((q[0], q[1].slice(0, f.COLUMNS - 64, 1)), k, zeros, False)
    else:
        return start_scores(q[0], k, zeros, f.COLUMNS, False)


@gluon.jit
def start_pv(f, p, acc, add, g, pred):
    """acc += P V of block g, asynchronous. P is in registers or, with P_SHARED, in its place."""
    if f.PAIRS:
        i = (g + 1) % f.V_STAGES  # beside K of the next block, which is there
    else:
        i = g % f.V_STAGES
        mbarrier.wait(f.bars.v_full.index(i), (g // f.V_STAGES) & 1, pred=pred)
    v = f.bufs.v.index(i)  # [BLOCK_N, BLOCK_DV]
    return start_sums(p, v, acc, add)  # [64, COLUMNS_V]
