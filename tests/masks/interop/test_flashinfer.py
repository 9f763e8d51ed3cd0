"""The block-sparse rows of FlashInfer, which are those of SciPy."""

import random

import numpy as np
import pytest

import masks
from masks import interop
from tests.masks.cases import any_blocks
from tests.notes import note

torch = pytest.importorskip("torch")
sparse = pytest.importorskip("scipy.sparse")


def check_bsr(seed: int):
    blocks = any_blocks(random.Random(seed))
    for b, h in np.ndindex(blocks.batch, blocks.heads):
        bsr = interop.to_bsr(blocks, b, h)
        assert bsr.indptr.dtype == bsr.indices.dtype == torch.int32
        assert (bsr.M, bsr.R, bsr.C) == (blocks.n_q, *blocks.block_size) and bsr.N % bsr.C == 0
        dense = blocks.to_dense()[b, h]
        # SciPy's BSR has the same form, for whole blocks.
        data = np.ones((len(bsr.indices), bsr.R, bsr.C), bool) if bsr.mask is None else bsr.mask
        shape = blocks.rows * bsr.R, bsr.N
        theirs = sparse.bsr_array(
            (np.asarray(data), bsr.indices.numpy(), bsr.indptr.numpy()), shape
        ).toarray()
        assert np.array_equal(theirs[: bsr.M, : blocks.n_k], dense)
        assert not theirs[:, blocks.n_k :].any()
        packed = bsr.packed_mask()
        if packed is None:
            assert (blocks.layout()[b, h] != 1).all()
            continue
        at = 0
        for row in range(blocks.rows):  # one query after the other, over the blocks of its row
            begin, end = bsr.indptr[row : row + 2].tolist()
            bits = [
                bool(theirs[q, col * bsr.C + k])
                for q in range(row * bsr.R, min(bsr.M, (row + 1) * bsr.R))
                for col in bsr.indices[begin:end].tolist()
                for k in range(bsr.C)
            ]
            size = -(-len(bits) // 8)
            found = np.unpackbits(packed[at : at + size].numpy(), bitorder="little")
            assert found[: len(bits)].astype(bool).tolist() == bits
            at += size
        assert at == len(packed)


def test_bsr():
    for seed in range(12):
        with note(seed):
            check_bsr(seed)


def test_bsr_without_a_mask_and_errors():
    blocks = masks.random_blocks(0.5, block=32).build(90, 128, 32)
    bsr = interop.to_bsr(blocks)
    assert bsr.mask is None and bsr.packed_mask() is None
    assert interop.to_bsr(masks.dense().build(64, 100, 32)).mask is not None  # for the padded keys
    with pytest.raises(ValueError, match="head is 1: give an integer <= 0"):
        interop.to_bsr(blocks, head=1)
    with pytest.raises(ValueError, match="FlashInfer's mask would take"):
        interop.to_bsr(masks.causal().build(100, block_size=32), limit_gib=0)
