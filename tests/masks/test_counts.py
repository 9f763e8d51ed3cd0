"""How much masks allow: closed forms and published counts; and masks that are the same."""

import numpy as np
import pytest

from tests.masks.helpers import B, dense, kinds, mask_of, rows

# Pairs of tokens, for so many queries and keys (or n of both).
PAIRS = """
prefix_lm(500)  =>  100  =>  100*100
tri_shape(4, 32, 10)  =>  150  =>  150*32 - 32*31/2 + 118*4 - 4*3/2 + 10*114 - 10*9/2
documents((5, 0, 70, 1, 100)) & causal()  =>  176  =>  5*6/2 + 70*71/2 + 1 + 100*101/2
documents((4, 9, 0, 30), (50, 0, 7, 3))  =>  43, 60  =>  4*50 + 30*3
shared_prefix(30, (5, 0, 70, 1, 100))  =>  206  =>  30*206 + 5*5 + 70*70 + 1 + 100*100
cells((5, 0, 70, 1, 100), ((4,), (), (2,), (0, 1), (0, 2)))
    =>  176  =>  5*105 + 70*70 + 6 + 100*175
cells((2, 3, 4), scipy.sparse.csr_array([[0, 1, 0], [0, 0, 0], [1, 0, 1]]))
    =>  9  =>  2*5 + 3*3 + 4*6
block_diffusion(50)  =>  240  =>  (50*50*2 + 20*20) + 50*50 + 20*100 + (50*50*3 + 20*120)
prefix_tree((0, 30, 35, 105), (205, 35, 105, 205))
    =>  205  =>  30*31/2 + 30*175 + 5*6/2 + 70*71/2 + 100*101/2
hstu((60, 100), (0, 30), context=10)
    =>  160  =>  60*61/2 + 600 - 10*11/2 + 70*71/2 + 700 - 10*11/2 + 30*71
hstu(100, 20, window=5, full=3)  =>  100  =>  77*6 - 5*6/2 + 78 + 79 + 80 + 20*81
radial(8)  =>  16*8  =>  8*8*(16 + 30) + (14 + 13)*2*(8*7 - 12) + (12 + 11 + 10 + 9)*2*22 + 36*2*8
local_2d((3, 4, 5), 1)  =>  60  =>  (3*3 - 2)*(3*4 - 2)*(3*5 - 2)
axial((3, 4, 5))  =>  60  =>  60*(3 + 4 + 5 - 2)
neighborhood((20, 4), (5, 2), dilation=(3, 1), causal=(True, False))
    =>  80  =>  (20*5 - 3*5*4/2)*4*2
longformer(32, global_tokens=(0, 100))  =>  300  =>  300*33 - 16*17 + 2*(2*300 - 2) - 33 - 65
etc_(30, 40)  =>  500  =>  30*(2*500 - 30) + 470*(2*40 + 1) - 40*41
global_tokens(2) >> packed((40, 3, 90))  =>  133  =>  40**2 - 38**2 + 3**2 - 1 + 90**2 - 88**2
fixed(50, 10)  =>  1000  =>  120500
"""

# Non-empty token blocks of B = 16 tokens, of n x n.
BLOCKS = """
local(16)  =>  16  =>  46
local(16) | global_tokens(16)  =>  64  =>  5*64 - 6
butterfly(16)  =>  4096  =>  53248
butterfly(16, 3)  =>  64  =>  64*4
butterfly(16) & causal()  =>  512  =>  2816
pixelfly(16)  =>  512  =>  6124
power_of_two(16)  =>  256  =>  3842
power_of_two(16) & causal()  =>  256  =>  2049
bigbird(16, per_head=False, seed=1)  =>  256  =>  2542
global_rows(144)  =>  5  =>  5*5
where(lambda q, k: (q // 64 == k // 64) | (k % 64 >= 48))  =>  64  =>  1216
where(lambda q, k: (q // 128 == k // 128) | (k % 128 >= 64))  =>  64  =>  64*(8 + 4*7)
fixed(64, 16) >> snap(16)  =>  64  =>  640
fixed(128, 16) >> snap(16)  =>  64  =>  512
local(16) >> snap(16) | global_tokens(16)  =>  64  =>  314
sliding(32) >> snap(16)  =>  16  =>  16*3 - 3
local(32) >> snap(16)  =>  16  =>  16*5 - 6
"""

# Full blocks, partial blocks and bit tiles of so many tokens in blocks of a size. Those of images
# of 128 x 128 are published, in rows and in tiles.
KINDS = """
causal()  =>  1024, 16  =>  2016, 64, 1
local(256)  =>  1 << 20, 128  =>  24574, 16380, 2
butterfly(256)  =>  1 << 20, 256  =>  4096*13, 0, 0
power_of_two() & causal()  =>  1 << 20, 128  =>  0, 106497, 3
power_of_two(128)  =>  1 << 20, 128  =>  8192 + 2*(8192*12 + 1), 0, 0
block_diffusion(4)  =>  1 << 17, 128  =>  512*511, 3*512, 3
where(lambda q, k: (abs(q - k) <= 2048) & ((q - k) % 4 == 0))  =>  1 << 20, 128  =>  0, 270064, 3
where(lambda q, k: (abs(q // 1024 - k // 1024) <= 16) & (abs(q % 1024 - k % 1024) <= 16))
    =>  1 << 20, 128  =>  0, 737440, 3
neighborhood((128, 128), 7)  =>  128**2, 64  =>  0, 3584, 4
neighborhood((128, 128), 33)  =>  128**2, 128  =>  0, 4224, 1
neighborhood((128, 128), 7) >> tiled((128, 128), (8, 8))  =>  128**2, 64  =>  0, 2116, 25
neighborhood((128, 128), 33) >> tiled((128, 128), (8, 16))  =>  128**2, 128  =>  520, 1400, 24
neighborhood((128, 128), 17) >> morton((128, 128))  =>  128**2, 64  =>  324, 1980, 24
neighborhood((128, 128), 33) >> hilbert((128, 128))  =>  128**2, 64  =>  2704, 3696, 72
neighborhood((128, 128), 33) >> hilbert((128, 128))  =>  128**2, 128  =>  464, 1600, 156
neighborhood((1024, 1024), 33) >> tiled((1024, 1024), (8, 16))
    =>  1 << 20, 128  =>  25608, 97272, 24
neighborhood((1024, 1024), 33) >> hilbert((1024, 1024))  =>  1 << 20, 128  =>  22252, 112300, 156
sliding_tiles((24, 24), 4, 3) >> tiled((24, 24), 4)  =>  24**2, 16  =>  36*9, 0, 0
sliding_tiles((8, 12, 16), 4, (1, 3, 2)) >> tiled((8, 12, 16), 4)  =>  1536, 64  =>  24*6, 0, 0
"""

# The same at so many queries and keys (or n of both).
SAME = """
sliding(8)  =>  local(7, 0)  =>  300
dilated(40, 1)  =>  local(40)  =>  300, 250
dilated(2**60, 2**60)  =>  local(0)  =>  300
diagonals(tuple(range(300)))  =>  causal()  =>  300
diagonals((2**60, -(2**60)))  =>  ~dense()  =>  300
fixed(7, 7)  =>  causal()  =>  300
fixed(48, 5, 2)
    =>  heads(fixed(48, 5), fixed(48, 0) | causal() & where(lambda q, k: abs(k % 48 - 40) <= 2))
    =>  300
global_tokens(2**60)  =>  dense()  =>  300
global_rows(37) | sinks(37)  =>  global_tokens(37)  =>  200, 150
global_at(range(37))  =>  global_tokens(37)  =>  200, 150
longnet(50, 1)  =>  block_diagonal(50)  =>  333
prefix_tree((0, 30, 35, 105), (205, 35, 105, 205))
    =>  shared_prefix(30, (5, 70, 100)) & causal()  =>  205
hstu(300)  =>  causal()  =>  300
hstu((100, 17, 250))  =>  documents((100, 17, 250)) & causal()  =>  367, 300
hstu(300, window=20)  =>  sliding(21)  =>  300
hstu(300, 40, context=7, window=20, full=300)  =>  hstu(300, 40, context=7)  =>  300
frame_causal(7, 10**6)  =>  block_causal(7)  =>  300, 250
frame_causal(1, 20, sinks=4)  =>  streaming(4, 20)  =>  300
prefix_tree((0, 4, 30, 90), (300, 300, 90, 300))
    =>  prefix_tree(np.arange(300), [300]*30 + [90]*60 + [300]*210)  =>  300
block_diffusion(1000) & global_rows(100)  =>  dense() & sinks(100) & global_rows(100)  =>  200
block_causal(7) >> shift(100)  =>  block_diffusion(7) - global_rows(100)  =>  200
causal() >> packed((100, 17, 0, 250))  =>  causal() & documents((100, 17, 0, 250))  =>  367
local(3, align='bottom_right') >> packed(300)  =>  local(3, align='bottom_right')  =>  300
butterfly(32) >> shift(32)
    =>  where(lambda q, k: np.isin((q // 32 - 1) ^ (k // 32 - 1), [0, 1, 2, 4, 8, 16]) & (k > 31))
    =>  1000
local(300) >> tiled((256, 64), (1, 64))  =>  local(300)  =>  1 << 14
where(lambda q, k: q >= k)  =>  causal()  =>  3000, 2777
where(lambda q, k: (q < 64) | (k < 64))  =>  global_tokens(64)  =>  1 << 18
where(lambda q, k: np.bool_(False))  =>  ~dense()  =>  3000, 2777
local_2d((18, 20), 3)
    =>  where(lambda q, k: (abs(q // 20 - k // 20) <= 3) & (abs(q % 20 - k % 20) <= 3))  =>  360
axial((18, 20))  =>  where(lambda q, k: (q // 20 == k // 20) | (q % 20 == k % 20))  =>  360
"""

# The definitions in other words, with n_q and n_k. Those of others come first:
# sliding_window_overlay(64) of transformers, causal and bidirectional;
# generate_sliding_window(64) of attention-gym; and FlashAttention's window_size=(70, 20) and
# causal, with both ends included and the last query at the last key.
FORMULAS = """
sliding(64)  =>  (k > q - 64) & (k <= q)
local(64)  =>  abs(q - k) <= 64
sliding(64 + 1)  =>  (q >= k) & (q - k <= 64)
local(70, 20, align='bottom_right')  =>  (k >= q + n_k - n_q - 70) & (k <= q + n_k - n_q + 20)
causal(align='bottom_right')  =>  k <= q + n_k - n_q
local(95, 63)  =>  (q - k <= 95) & (k - q <= 63)
causal()  =>  k <= q
dense()  =>  k >= 0
sinks(37)  =>  np.isin(k, range(37))
keys_at((3, 64, 1000))  =>  (k == 3) | (k == 64)
global_rows(37)  =>  np.isin(q, range(37))
global_tokens(37)  =>  np.isin(q, range(37)) | np.isin(k, range(37))
global_at((3, 64, 1000))  =>  np.isin(q, [3, 64]) | (k == 3) | (k == 64)
last_rows(37)  =>  n_q - q <= 37
dilated(40, 16)  =>  np.isin(q - k, [-32, -16, 0, 16, 32])
dilated(40, 20, align='bottom_right')  =>  np.isin(q + n_k - n_q - k, [-40, -20, 0, 20, 40])
diagonals((0, 7, -3))  =>  (q == k) | (q == k + 7) | (k == q + 3)
diagonals((0, 7), align='bottom_right')  =>  (k == q + n_k - n_q) | (k == q + n_k - n_q - 7)
power_of_two()  =>  np.isin(abs(q - k), [0, 1, 2, 4, 8, 16, 32, 64, 128, 256])
power_of_two(24)  =>  np.isin(abs(q // 24 - k // 24), [0, 1, 2, 4, 8, 16])
log_sparse()  =>  np.isin(q - k, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256])
strided(24)  =>  np.isin(q - k, range(24)) | np.isin(q - k, range(0, 1000, 24))
strided(24, align='bottom_right')
    =>  np.isin(q + n_k - n_q - k, range(24)) | np.isin(q + n_k - n_q - k, range(0, 1000, 24))
fixed(24, 5)  =>  (k <= q) & ((q // 24 == k // 24) | np.isin(k % 24, [19, 20, 21, 22, 23]))
block_diagonal(50, 20)
    =>  np.searchsorted(BREAKS, q, 'right') == np.searchsorted(BREAKS, k, 'right')
longnet(64, 8, 7)  =>  (q // 64 == k // 64) & (q % 8 == 7) & (k % 8 == 7)
longnet(50, 8, 3)  =>  (q // 50 == k // 50) & (q % 50 % 8 == 3) & (k % 50 % 8 == 3)
frame_causal(5, 4, chunk=2)  =>  (k // 10 <= q // 10) & (k // 5 > q // 10 * 2 - 3)
frame_causal(5, 4, sinks=3)  =>  (k // 5 <= q // 5) & ((k < 15) | (k // 5 > q // 5 - 4))
block_diffusion(50) >> packed((600,))
    =>  np.where(k < 300, q // 50 == k // 50, k // 50 - 6 * (q < 300) <= q // 50 - (q < 300))
"""
BREAKS = range(30, 1000, 50)


def lengths(text: str) -> tuple[int, ...]:
    return eval(f"({text},)")


@pytest.mark.parametrize(("mask", "n", "count"), rows(PAIRS))
def test_pairs(mask: str, n: str, count: str):
    assert dense(mask_of(mask), *lengths(n)).sum() == eval(count)


@pytest.mark.parametrize(("mask", "n", "count"), rows(BLOCKS))
def test_blocks(mask: str, n: str, count: str):
    assert mask_of(mask).build(int(n) * B, block_size=B).nnz == eval(count)


@pytest.mark.parametrize(("mask", "size", "found"), rows(KINDS))
def test_kinds(mask: str, size: str, found: str):
    assert kinds(mask_of(mask), *lengths(size)) == lengths(found)


@pytest.mark.parametrize(("mask", "other", "n"), rows(SAME))
def test_the_same(mask: str, other: str, n: str):
    assert mask_of(mask).build(*lengths(n)) == mask_of(other).build(*lengths(n))


@pytest.mark.parametrize(("mask", "formula"), rows(FORMULAS))
def test_formulas(mask: str, formula: str):
    for n_q, n_k in ((512, 512), (300, 450), (150, 500)):
        places = {"q": np.arange(n_q)[:, None], "k": np.arange(n_k), "n_q": n_q, "n_k": n_k}
        assert (
            dense(mask_of(mask), n_q, n_k) == eval(formula, {"np": np, "BREAKS": BREAKS}, places)
        ).all()
