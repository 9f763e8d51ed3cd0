"""Canonical texts: they appear in files and results, so they stay as they are."""

import pickle
import re

import numpy as np
import pytest

import masks

CANONICAL = """
causal(); causal(align='bottom_right'); local(5); local(5, 0); sliding(7); dense()
bigbird(16, 2, window=5, global_blocks=2, seed=3, per_head=False)
bigbird(16, 2, per_layer=True, layer=3); bigbird(16, 2, per_layer=True)
bigbird_compat(32, 2, seed=5); bigbird_compat(32, 2, seed=None); block_diagonal(50)
block_diagonal(50, offset=3); butterfly(64); butterfly(size=16); sinks(4); global_tokens(4)
global_rows(2); last_rows(3); dilated(48, 4); dilated(48, 4, align='bottom_right'); power_of_two()
power_of_two(align='bottom_right'); log_sparse(64); documents((3, 5)); shared_prefix(3, (4, 5))
random_regular(4, 16, seed=3, per_head=True); expander(6, 32, per_layer=True); hubs(); hubs(3)
hubs(alpha=0.5); random_blocks(0.5); random_blocks(count=3); local_2d((8, 8), 2)
local_2d((8, 8), 2, norm='manhattan'); longnet(64, 4); longnet(64, 4, per_head=True)
neighborhood((8, 8), 3); sliding_tiles((8, 8), (2, 4), 1); strided(8)
strided(8, align='bottom_right'); fixed(8, 2); heads(causal(), local(3))
layers(causal(), local(3)); heads(causal(), local(3) | dense()) | layers(dense(), causal())
deepspeed_fixed(8, 2, attention='unidirectional', num_different_global_patterns=2, block=32)
deepspeed_variable(); deepspeed_bigbird(); deepspeed_bslongformer()
deepspeed_local_sliding_window(); lra_bigbird(16, 2, seed=None); causal() >> shift(3)
causal() >> shift(3, 4); causal() >> shift(-3); (causal() | dense()) >> packed((3, 4))
causal() >> snap(16); dense() >> tiled((8, 8), 2); dense() >> tiled((8, 8), (2, 4), side='keys')
dense() >> morton((8, 8)); dense() >> hilbert((8, 8), side='queries'); ~(causal() | dense())
causal() & (local(3) | dense())
"""
OTHERS = """
local(5, 5)  =>  local(5)
local(np.int64(5), right=3, align='bottom_right')  =>  local(5, 3, align='bottom_right')
sliding(window=7, align='bottom_right')  =>  sliding(7, align='bottom_right')
bigbird()  =>  bigbird(64, 3)
bigbird(16)  =>  bigbird(16, 3)
bigbird(16, 2, per_layer=True).layer(4)  =>  bigbird(16, 2, per_layer=True, layer=4)
bigbird_compat()  =>  bigbird_compat(64, 3)
bigbird_compat(32, 2, seed=None).layer(3)  =>  bigbird_compat(32, 2, seed=3)
block_diagonal(50, 3)  =>  block_diagonal(50, offset=3)
block_causal(32)  =>  block_diagonal(32) | causal()
butterfly()  =>  butterfly(128)
butterfly(64, 3)  =>  butterfly(64, levels=3)
butterfly(levels=2)  =>  butterfly(128, levels=2)
butterfly(size=16, levels=2)  =>  butterfly(levels=2, size=16)
pixelfly()  =>  butterfly(128) | global_tokens(128)
pixelfly(64, 2, 3)  =>  butterfly(64, levels=2) | global_tokens(192)
keys_at((5, 1, 9))  =>  keys_at((1, 5, 9))
keys_at([5, 1])  =>  keys_at((1, 5))
prefix_lm(10)  =>  sinks(10) | causal()
prefix_lm(3, align='bottom_right')  =>  sinks(3) | causal(align='bottom_right')
global_at((3, 1))  =>  global_at((1, 3))
diagonals((5, 1, -3))  =>  diagonals((-3, 1, 5))
diagonals([5, 1])  =>  diagonals((1, 5))
power_of_two(16)  =>  power_of_two(block=16)
log_sparse()  =>  power_of_two() & causal()
log_sparse(64, 8)  =>  log_sparse(64, restart=8)
log_sparse(64, 64)  =>  log_sparse(64)
documents([3, 5])  =>  documents((3, 5))
documents([[3, 5], [4, 4]])  =>  documents(((3, 5), (4, 4)))
documents([[3, 5]])  =>  documents((3, 5))
documents((3, 5), (2, 2))  =>  documents((3, 5), key_lengths=(2, 2))
documents((3, 5), (3, 5))  =>  documents((3, 5))
documents(np.array([3, 5]))  =>  documents((3, 5))
documents([1]*70)  =>  documents('sha256:..')
documents([1]*70, [2]*70)  =>  documents('sha256:..', key_lengths='sha256:..')
documents(7)  =>  documents((7,))
documents_from_offsets([0, 3, 8])  =>  documents((3, 5))
documents_from_ids([0, 0, 1, 1])  =>  documents((2, 2))
documents_from_ids([0, 1, 0, 1])  =>  documents_from_ids((0, 1, 0, 1))
documents_from_ids([0, 1, 0, 1], [1, 0, 0, 1])
    =>  documents_from_ids((0, 1, 0, 1), key_ids=(1, 0, 0, 1))
documents_from_ids(np.array([[0, 1, 0, 1], [1, 1, 1, 0]]))
    =>  documents_from_ids(((0, 1, 0, 1), (1, 1, 1, 0)))
documents_from_ids([0, 1]*50)  =>  documents_from_ids('sha256:..')
shared_prefix(3, [[4, 5], [2, 7]])  =>  shared_prefix(3, ((4, 5), (2, 7)))
random_regular(4)  =>  random_regular(4, 128)
expander()  =>  expander(8, 128)
expander(6, 32, per_layer=True).layer(2)  =>  expander(6, 32, per_layer=True, layer=2)
hubs(3, alpha=2, block=16)  =>  hubs(3, alpha=2.0, block=16)
random_blocks(1)  =>  random_blocks(1.0)
random_blocks(None, count=3, block=16, causal=True, seed=9, per_head=True, per_layer=True)
    =>  random_blocks(count=3, block=16, causal=True, seed=9, per_head=True, per_layer=True)
random_blocks(np.float32(0.5))  =>  random_blocks(0.5)
local_2d((8, 8), (2, 2))  =>  local_2d((8, 8), 2)
local_2d([8, 8], (2, 3))  =>  local_2d((8, 8), (2, 3))
axial((4, 5))  =>  local_2d((4, 5), (3, 0)) | local_2d((4, 5), (0, 4))
longformer(32)  =>  local(16) | global_at((0,))
longformer(32, 2)  =>  dilated(32, 2) | global_at((0,))
longformer(32, 1, ())  =>  local(16)
etc_(4, 8)  =>  global_tokens(4) | local(8)
longnet(64, 4, 1)  =>  longnet(64, 4, offset=1)
neighborhood((8, 8), (3, 5), dilation=(1, 1), stride=(2, 2), causal=(True, False))
    =>  neighborhood((8, 8), (3, 5), stride=2, causal=(True, False))
neighborhood((8, 8), (3, 3), causal=(True, True))  =>  neighborhood((8, 8), 3, causal=True)
sliding_tiles((8, 8), 2, (3, 3))  =>  sliding_tiles((8, 8), 2, 3)
fixed(8, 2, 2)  =>  fixed(8, 2, vertices=2)
streaming(4, 8)  =>  (sinks(4) | sliding(8)) & causal()
streaming(4, 8, align='bottom_right')
    =>  (sinks(4) | sliding(8, align='bottom_right')) & causal(align='bottom_right')
tri_shape(4, 8, 2)  =>  (sinks(4) | sliding(8) | last_rows(2)) & causal()
vertical_slash((3, 1), (0, 4))  =>  (keys_at((1, 3)) | diagonals((0, 4))) & causal()
deepspeed_fixed()  =>  deepspeed_fixed(4, 1)
deepspeed_fixed(horizontal_global_attention=True)
    =>  deepspeed_fixed(4, 1, horizontal_global_attention=True)
deepspeed_variable(2, global_block_end_indices=(7,))
    =>  deepspeed_variable(num_random_blocks=2, global_block_end_indices=(7,))
deepspeed_variable(local_window_blocks=[4], global_block_indices=[0])  =>  deepspeed_variable()
deepspeed_bigbird(2, 5)
    =>  deepspeed_bigbird(num_random_blocks=2, num_sliding_window_blocks=5)
deepspeed_bslongformer(5, (0, 3))
    =>  deepspeed_bslongformer(num_sliding_window_blocks=5, global_block_indices=(0, 3))
deepspeed_local_sliding_window(5, attention='bidirectional')
    =>  deepspeed_local_sliding_window(num_sliding_window_blocks=5, attention='bidirectional')
lra_local()  =>  block_diagonal(50)
lra_local(interleaved=True)  =>  lra_local(50, interleaved=True)
lra_fixed()  =>  lra_fixed(50, 10)
lra_strided()  =>  strided(50)
lra_longformer()  =>  local(255, 256)
lra_longformer(64, 2)  =>  local(31, 32) | global_tokens(2)
lra_bigbird()  =>  lra_bigbird(64, 3)
lra_bigbird(16, 2, seed=None).layer(1)  =>  lra_bigbird(16, 2, seed=1)
causal() >> shift(3, 3)  =>  causal() >> shift(3)
causal() >> packed([[3, 4], [5, 2]])  =>  causal() >> packed(((3, 4), (5, 2)))
causal() >> packed((3, 4), (2, 2))  =>  causal() >> packed((3, 4), key_lengths=(2, 2))
causal() >> packed([1]*70)  =>  causal() >> packed('sha256:..')
causal() >> snap((16, 16))  =>  causal() >> snap(16)
causal() >> snap((16, 32), 'inward')  =>  causal() >> snap((16, 32), how='inward')
causal() >> snap(16, how='outward')  =>  causal() >> snap(16)
dense() >> permuted([1, 0, 2])  =>  dense() >> permuted((1, 0, 2))
dense() >> permuted([1, 0, 2], side='keys')  =>  dense() >> permuted((1, 0, 2), side='keys')
dense() >> permuted(list(range(70)))  =>  dense() >> permuted('sha256:..')
causal()-local(3)  =>  causal() & ~local(3)
"""


def mask_of(expression: str) -> masks.Mask:
    return eval(expression, {**vars(masks), "np": np})


@pytest.mark.parametrize("text", re.split(r"; |\n", CANONICAL.strip()))
def test_a_canonical_text_is_read_back(text: str):
    mask = masks.parse(text)
    assert str(mask) == text and mask == mask_of(text) and mask.spelled
    assert pickle.loads(pickle.dumps(mask)) == mask


@pytest.mark.parametrize(
    ("expression", "text"),
    [line.split("  =>  ") for line in OTHERS.strip().replace("\n    =>", "  =>").split("\n")],
)
def test_text(expression: str, text: str):
    mask = mask_of(expression)
    assert re.sub("sha256:[0-9a-f]{64}", "sha256:..", str(mask)) == text
    assert mask.spelled == ("sha256" not in text) and pickle.loads(pickle.dumps(mask)) == mask
    if mask.spelled:
        assert masks.parse(str(mask)) == mask
