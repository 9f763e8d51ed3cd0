"""Masks that differ from head to head and from layer to layer."""

import numpy as np

import masks

LOCAL, BUTTERFLY = masks.local(5), masks.butterfly(16)


def test_heads_compose():
    mask = masks.heads(LOCAL, BUTTERFLY) & masks.causal() | masks.heads(*[LOCAL] * 3)
    assert mask.build(50, block_size=16).heads == 6
    nested = masks.heads(masks.heads(*[LOCAL] * 3), BUTTERFLY)
    assert nested.build(50, block_size=16).heads == 6
    two = masks.heads(LOCAL, masks.random_blocks(count=1, block=16, per_head=True))
    assert two.build(64, heads=4).heads == 4


def test_a_head_without_mixed_blocks():
    parts = masks.causal() >> masks.snap(16), LOCAL
    dense = masks.heads(*parts).build(100, block_size=16).to_dense()[0]
    for head, part in zip(dense, parts, strict=True):
        assert np.array_equal(head, part.build(100, block_size=16).to_dense()[0, 0])


def test_layers_take_turns():
    mask = (masks.layers(LOCAL, BUTTERFLY, masks.dense()) | masks.sliding(3)) & masks.causal()
    assert mask.per_layer and not mask.layer(0).per_layer
    assert mask.layer(4) == (BUTTERFLY | masks.sliding(3)) & masks.causal()
    assert masks.parse(str(mask)) == mask
    assert LOCAL.layer(7) is LOCAL
    assert (~masks.layers(LOCAL, BUTTERFLY)).layer(1) == ~BUTTERFLY
    assert masks.heads(masks.layers(LOCAL, BUTTERFLY), LOCAL).layer(1) == masks.heads(
        BUTTERFLY, LOCAL
    )
    assert masks.layers(masks.layers(LOCAL, BUTTERFLY), LOCAL).layer(0) == LOCAL
