"""What masks refuse: the error names the argument, the value and the remedy."""

import re

import pytest

from tests.masks.helpers import mask_of, rows
from tests.notes import note

REFUSED = r"""
local(-1)  =>  left is -1: give an integer >= 0
local(2**70)  =>  left is 1180591620717411303424: give an integer <= 
local(True)  =>  left is True
fixed(8, 3, 3)  =>  vertices is 3: give at most 2
neighborhood((8, 8), 3, causal=1)  =>  causal is 1: give True or False
frame_causal(16, sinks=2)  =>  sinks is 2 and window None: give the window too
diagonals((1, 2.5))  =>  a number in distances is 2.5
causal(align='left')  =>  align is 'left': choose one of 'top_left'
random_blocks()  =>  give one of them
random_blocks(0.0)  =>  density is 0.0: give a number in \(0, 1\]
random_blocks(count=5).build(512)  =>  draws 5 key blocks.* but there are 4
random_blocks(0.5, per_head=True).build(512)  =>  give heads=
mask_from(np.ones((4, 4)))  =>  float64: give booleans
mask_from(np.ones(4, bool))  =>  shape \(4,\)
mask_from(np.eye(4) > 0).build(5)  =>  build it for n_q=4, n_k=4
mask_from(np.ones((3, 4, 4), bool)).build(4, heads=2)  =>  heads is 2, but
causal().build(64, block_size=24)  =>  block_size is 24: give multiples of 16
causal().build(64, block_size=(64, 64, 64))  =>  block_size is
global_at(4)  =>  tokens is 4: give a tuple
keys_at((4, 4))  =>  tokens has 4 twice
power_of_two(16, align='bottom_right')  =>  leave one of them out
documents([])  =>  lengths has 0 tokens in a row
documents([3, [4]])  =>  lengths mixes numbers and lists
documents([3, 4], [7])  =>  lengths has \[2\] documents and key_lengths \[1\]
documents([3, 4]).build(8)  =>  have 7 tokens together, but n_q is 8
documents([[9], [4]]).build(3, batch=3)  =>  batch is 3
documents_from_offsets([0, 5, 3])  =>  offsets must ascend from 0
documents_from_ids([0.5])  =>  ids are float64
documents_from_ids([[[1]]])  =>  shape \(1, 1, 1\)
documents_from_ids([[1], [2]], [1])  =>  ids has 2 rows and key_ids 1
documents_from_ids([0, 1, 0]).build(9)  =>  the ids have 3 tokens together, but n_q is 9
prefix_tree([0, 5], [9])  =>  enter has \[2\] nodes and leave \[1\]
prefix_tree([0, 4, 4], [8, 8, 8])  =>  enter must ascend from 0, not go \(0, 4, 4\)
prefix_tree([0, 4], [3, 8])  =>  node 0 enters at 0 and leaves at 3, before 4
prefix_tree([0, 4], [10, 4])  =>  node 1 enters at 4 and leaves at 4, before 10
prefix_tree([0, 4, 8], [12, 8, 14])  =>  node 2 enters at 8 and leaves at 14, after 12
prefix_tree([0, 4], [8, 8]).build(9)  =>  the nodes have 8 tokens .* n_q is 9: add one
hstu([9, 9], [1, 1, 1])  =>  targets is \[1, 1, 1\]: give one number, or one for every user
hstu([[9], [9, 9]], [[1, 1], [1]])  =>  give one number, or one for every user
hstu([20, 9], 6, context=4)  =>  user 1 has 9 tokens, but context is 4 and targets 6
hstu(9, full=2)  =>  full is 2 and window None: give the window too
hstu([9, 9]).build(19)  =>  the users have 18 tokens together, but n_q is 19
block_diffusion(4).build(99)  =>  n_q is 99 and n_k 99, but .* has two halves.*give one even number
butterfly(64, size=8)  =>  block is 64 and size is 8: give one of them
butterfly(size=24)  =>  size is 24: give a power of two
butterfly(size=16, levels=5)  =>  levels is 5: 16 blocks have 4
random_regular(3)  =>  degree is 3: give an even number
expander(layer=3)  =>  layer is 3: a layer needs per_layer=True
bigbird(window=2)  =>  window is 2: give an odd number
neighborhood((8, 8), 3).build(63)
    =>  n_q is 63 and n_k 63, but .* has 64 tokens: .* such as a class token, .* >> shift\(m\)
(local_2d((8, 8), 3) >> tiled((4, 4), 2)).build(16)  =>  has 64 tokens
neighborhood((8, 4), 3, dilation=2)  =>  needs an extent of 6, but .* has 4
neighborhood((8, 8), 3, stride=4)  =>  stride is 4: give an integer <= the kernel
neighborhood((8, 8), (3, 3, 3))  =>  kernel is \(3, 3, 3\): give one integer, or 2
neighborhood((8, 8), 3, causal=(True,))  =>  give one flag, or 2
neighborhood(64, 3)  =>  canvas is 64: give one to three extents
sliding_tiles((8, 8), 4, 3)  =>  window is 3, but an extent of 8 has 2 tiles of 4
fixed(8, 1, 2).build(64, heads=3)  =>  repeats after 2
cells((3, 4), ((1,),))  =>  neighbours has 1 lists and sizes 2
cells((3, 4), ((1,), (2,)))  =>  neighbours of cell 1 have 2: give numbers 0..1
cells((3, 4), ((1,), (0.5,)))  =>  neighbours is tuple: give a list of integers for every cell
cells(((3, 4), (4, 3)), ((1,), (0,)))  =>  sizes has 2 lists
cells((3, 4), ((1,), (0,))).build(8)  =>  have 7 tokens together, but n_q is 8
packed([3, 4], [7])  =>  documents and key_lengths
(causal() >> packed([5])).build(6)  =>  5 tokens together, but n_q is 6
shift(1.5)  =>  q is 1.5
snap(16, 'up')  =>  how is 'up': choose one of 'outward', 'inward'
(causal() >> hilbert((8, 8))).build(65)
    =>  reorders 64 tokens, not 65: .* write mask >> hilbert\(\(8, 8\)\) >> shift\(m\)
hilbert((4, 4, 4))  =>  canvas is \(4, 4, 4\): give \(height, width\)
permuted([0, 2])  =>  order must hold each of 0\.\.1 once
permuted([])  =>  give integers
permuted(100, side='both')  =>  shape \(\)
heads()  =>  give at least one mask
layers(local(5), 3)  =>  layers has 3 among its parts: give masks
layers(local(5), dense()).build(64)  =>  build mask.layer\(i\) instead
heads(local(5), causal(), dense()).build(50, heads=4)  =>  heads is 4, but .* repeats after 3
(heads(local(5), causal()) & mask_from(np.ones((3, 50, 50), bool))).build(50)
    =>  is made for heads=3, but repeats after 2
(heads(local(5), causal()) | heads(local(5), causal(), dense())).build(50, heads=3)
    =>  heads is 3, but .* repeats after 6
longnet(32, 4, per_head=True).build(100, heads=6)  =>  repeats after 4
documents([[3], [3]]) | documents([[1], [2], [3]])  =>  batch extents 2 and 3 do not combine
causal().draw(2048, ax='left')  =>  ax is 'left': give plain axes
causal().draw(2048, rows=(0, 2048))  =>  rows
causal().draw(2048, path=0)  =>  path is 0: give the path of a file, such as 'mask.png'
causal().build(64).save(0)  =>  path is 0: give the path of a file, such as 'mask.npz'
parse(causal())  =>  a mask text is expected, not causal\(\): give a str
where(lambda q, k: q > k and k > 3)  =>  fails.*Write & \| ~.*np\.maximum
where(lambda q, k: (q - k).abs() < 3)  =>  abs\(d\) for d\.abs\(\), and masks\.table
where(lambda q, k: q - k)  =>  gives int64: give booleans.* for a torch tensor ids\[q\]
where(lambda q, k: np.ones(7, bool))  =>  gives shape \(7,\)
where(lambda q: q > 0)  =>  <lambda>\(q\) cannot be called as fn\(q, k\)
where(lambda b, h, q, kv: q >= kv)
    =>  \(b, h, q, kv\) cannot be .* per_head=True.* mask_mod\(0, 0, q, k\)
where(lambda q, k: q >= k, batch=2)  =>  cannot be called as fn\(b, q, k\)
where(lambda h, q: h > q)  =>  parameter h would get the number q.* per_head=True
where(3)  =>  where\(\) is given 3, no function
where(lambda h, q, k: q > h, per_head=True).build(64)  =>  give heads=
where(lambda h, q, k: abs(q - k) < table([3, 50])[h], per_head=True).build(64, heads=4)
    =>  entry [23] of a table of 2
table(np.zeros((2, 2)))  =>  float64 of shape \(2, 2\): give a 1-D array.* ids\[b \* n \+ q\]
table(['a'])  =>  the table is <U1
table([0.0, np.nan])  =>  not finite: give finite numbers
table(np.array([1 << 63], np.uint64))  =>  give numbers below 2\*\*63
interop.to_flex(local(3))  =>  blocks is 'local\(3\)'.*: give a BlockMask, such as mask\.build\(n\)
interop.from_flex(local(3))  =>  flex_mask is 'local\(3\)'.*: give a BlockMask of FlexAttention
interop.to_flex(local(3).build(9), mask_mod=lambda q, k: q >= k)
    =>  cannot be called as fn\(b, h, q, k\)
interop.to_flex(local(3).build(9), mask_mod=lambda b, h, kv, q: q >= kv)
    =>  mask_mod is .*\(b, h, k, q\)
interop.to_flex(local(3).build(9), mask_mod=causal())
    =>  mask_mod is 'causal\(\)'.*: give a function
mask_from(local(3))  =>  array is Band: give booleans
causal().build(64, 128).reach()  =>  only self-attention
causal().build(1 << 16).reach(exact=True)  =>  32768 at most
layers(local(0), dense()).reach(64)  =>  differs from layer to layer: give layers=
BlockMask.from_layout(np.ones((4, 4)), 16)  =>  layout is float64: give booleans or integers
BlockMask.from_layout(np.ones((0, 4), bool), 16)  =>  give at least one block
BlockMask.from_layout(np.ones(4, bool), 16)  =>  layout has shape \(4,\): give \(rows, cols\)
BlockMask.from_layout(np.ones((4, 4), bool), 16, n_q=99)  =>  give n_q between 49 and 64
causal().build(64, block_size=16).take([0.5], [0])  =>  rows is .*: give \(R,\) numbers of blocks
causal().build(64, block_size=16).take([0], [9])  =>  cols must be different numbers from 0 to 3
"""


def test_errors_name_value_and_remedy():
    for expression, message in rows(REFUSED):
        with note(expression):
            with pytest.raises(ValueError) as error:
                mask_of(expression)
            assert re.search(message, str(error.value)), error.value
