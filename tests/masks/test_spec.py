"""Masks as text: canonical texts, which stay as they are in files and results, and the parser."""

import pickle
import re

import pytest

import masks
from masks import parse
from masks.registry import PATTERNS, TRANSFORMS
from tests.masks.helpers import mask_of, rows

PARSED = """
local:256+butterfly:128+global:64*causal
    =>  local(256) | butterfly(128) | (global_tokens(64) & causal())
(local:256+butterfly)*causal  =>  (local(256) | butterfly(128)) & causal()
local:256+butterfly&causal  =>  (local(256) | butterfly(128)) & causal()
local:256|butterfly&causal  =>  local(256) | (butterfly(128) & causal())
dense-causal-local:256  =>  dense() & ~causal() & ~local(256)
~causal | ~(global(64))  =>  ~causal() | ~global_tokens(64)
  local ( 256 ) |\tcausal   =>  local(256) | causal()
local:left=1:right=2:align=bottom_right  =>  local(1, 2, align='bottom_right')
sliding:4096-global_tokens:64  =>  sliding(4096) & ~global_tokens(64)
random:0.1  =>  random_blocks(0.1)
random:1e-3  =>  random_blocks(0.001)
random_blocks(None, count=3)-local:256  =>  random_blocks(count=3) & ~local(256)
heads(local:256+causal,~causal)  =>  heads(local(256) | causal(), ~causal())
layers(heads(causal, causal()), causal)  =>  layers(heads(causal(), causal()), causal())
"""


@pytest.mark.parametrize(("text", "canonical"), rows(PARSED))
def test_parse(text: str, canonical: str):
    assert str(parse(text)) == str(parse(text.replace(" |", "\n|"))) == canonical


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("", 0, "does not read"),
        ("local:256 + ", 12, "does not read"),
        ("local:256 + lokal:3", 12, "unknown pattern 'lokal'"),
        ("global:3 + (causal", 11, "does not read"),
        ("causal + global:-4", 9, "n is -4"),
        ("local(2, wide=3)", 0, "unexpected keyword argument 'wide'"),
        ("global:64 + causal and local:3", 0, "use a pattern, | & ~ -"),
        ("local(2 + 3)", 6, "use a pattern"),
        ("local({3})", 6, "is no argument"),
        ("heads(causal, lokal:3)", 14, "did you mean local"),
        ("causal >> local:3", 10, "'local' is a pattern"),
        ("causal >> 3", 10, "is no transform"),
        ("causal >> twirl:3", 10, "unknown transform 'twirl'"),
        ("local(**{'left': 3})", 0, r"\*\* has no place"),
        ("causal | mask_from((2, 2), 'x')", 9, "array mask has no text"),
        ("__import__('os').system('true')", 0, "use a pattern"),
        ("causal; causal", 6, "does not read"),
    ],
)
def test_errors_have_a_position(text: str, position: int, problem: str):
    with pytest.raises(ValueError, match=problem) as caught:
        parse(text)
    message = str(caught.value)
    assert f"position {position} " in message


@pytest.mark.usefixtures("own_patterns")
def test_a_name_is_taken_once():
    with pytest.raises(ValueError, match=r"'causal' is the name of masks\.patterns\.bands\.causal"):

        @masks.pattern()
        def causal():
            return masks.dense()

    with pytest.raises(ValueError, match=r"'shift' is the name of masks\.transforms\.\w+\.shift"):

        @masks.pattern()
        def shift():
            return masks.dense()

    with pytest.raises(ValueError, match=r"'local' is the name of"):

        @masks.pattern(short="local")
        def longer():
            return masks.dense()

    assert "longer" not in PATTERNS

    for _ in range(2):  # as when a notebook runs a cell again

        @masks.pattern(short="mine")
        def my_own():
            return masks.local(3)

    assert parse("mine - my_own()") == masks.local(3) - masks.local(3)


def test_every_pattern_is_public():
    for name, entry in (PATTERNS | TRANSFORMS).items():
        if entry.function.__module__.startswith("masks."):
            assert getattr(masks, entry.function.__name__) is entry.function, name
            assert entry.function.__name__ in masks.__all__


OWN = """import masks

@masks.pattern()
def own_stripes(step=2):
    return masks.where(lambda q, k: k % step == 0)
"""


def test_modules_of_the_environment_have_patterns_too(monkeypatch, tmp_path):
    (tmp_path / "own_stripes_module.py").write_text(OWN)
    (tmp_path / "own_fault.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(PATTERNS, "own_stripes", None)  # taken back at the end
    monkeypatch.delitem(PATTERNS, "own_stripes")
    with pytest.raises(ValueError, match="unknown pattern 'own_stripes'"):
        parse("own_stripes:4")
    monkeypatch.setenv("SPARSEFLASH_PATTERNS", "own_stripes_module, math")
    assert parse("own_stripes:4+global:1").build(32).to_dense()[0, 0, 5].sum() == 32 // 4
    for name, why in (("nowhere", "ModuleNotFoundError: No module"), ("own_fault", "ZeroDivision")):
        monkeypatch.setenv("SPARSEFLASH_PATTERNS", name)
        with pytest.raises(ValueError, match=rf"SPARSEFLASH_PATTERNS={name} cannot be .* \({why}"):
            parse("own_spots")


CANONICAL = """
causal(); causal(align='bottom_right'); local(5); local(5, 0); sliding(7); dense()
bigbird(16, 2, window=5, global_blocks=2, seed=3, per_head=False)
bigbird(16, 2, per_layer=True, layer=3); bigbird(16, 2, per_layer=True)
block_diagonal(50)
block_diffusion(4); block_diffusion(4) >> packed((30, 60)); prefix_tree((0, 2), (5, 5))
prefix_tree(((0, 2), (0, 3)), ((5, 5), (3, 6))); hstu((9, 20), targets=(3, 4), context=2)
hstu(((9,), (8, 5)), targets=4, window=7, full=2); frame_causal(16, window=4); radial(8)
frame_causal(16, window=4, sinks=1, chunk=2); radial(1560, least=128)
block_diagonal(50, offset=3); butterfly(64); butterfly(size=16); sinks(4); global_tokens(4)
global_rows(2); last_rows(3); dilated(48, 4); dilated(48, 4, align='bottom_right'); power_of_two()
power_of_two(align='bottom_right'); documents((3, 5)); shared_prefix(3, (4, 5))
random_regular(4, 16, seed=3, per_head=True); expander(6, 32, per_layer=True)
random_blocks(0.5); random_blocks(count=3); local_2d((8, 8), 2)
longnet(64, 4); longnet(64, 4, per_head=True)
neighborhood((8, 8), 3); sliding_tiles((8, 8), (2, 4), 1); strided(8)
strided(8, align='bottom_right'); fixed(8, 2); heads(causal(), local(3))
layers(causal(), local(3)); heads(causal(), local(3) | dense()) | layers(dense(), causal())
causal() >> shift(3)
causal() >> shift(3, 4); causal() >> shift(-3); (causal() | dense()) >> packed((3, 4))
causal() >> snap(16); dense() >> tiled((8, 8), 2); dense() >> tiled((8, 8), (2, 4), side='keys')
dense() >> morton((8, 8)); dense() >> hilbert((8, 8), side='queries'); ~(causal() | dense())
causal() & (local(3) | dense()); ~(dense() & ~global_tokens(3))
local(1, 2) | (causal() & sliding(4)); random_blocks(count=3, block=64, seed=7, per_head=True)
documents(((3, 5), (8,))); shared_prefix(4, (3, 5)); block_diagonal(16) | (causal() & ~dense())
neighborhood((128,), 3, causal=True); local_2d((2, 8, 8), 3)
sliding_tiles((16, 8), (4, 2), 3); (local(3) | dense()) >> packed((3, 5), key_lengths=(4, 0))
(causal() >> snap((64, 16), how='inward') >> packed((9, 9))) | dense()
(causal() | dense()) >> tiled((64,), 5) >> hilbert((4, 16))
"""
OTHERS = """
local(5, 5)  =>  local(5)
local(np.int64(5), right=3, align='bottom_right')  =>  local(5, 3, align='bottom_right')
bigbird()  =>  bigbird(64, 3)
bigbird(16, 2, per_layer=True).layer(4)  =>  bigbird(16, 2, per_layer=True, layer=4)
block_causal(32)  =>  block_diagonal(32) | causal()
butterfly(levels=2)  =>  butterfly(128, levels=2)
butterfly(size=16, levels=2)  =>  butterfly(levels=2, size=16)
pixelfly(64, 2, 3)  =>  butterfly(64, levels=2) | global_tokens(192)
keys_at((5, 1, 9))  =>  keys_at((1, 5, 9))
prefix_lm(10)  =>  sinks(10) | causal()
global_at((3, 1))  =>  global_at((1, 3))
power_of_two(16)  =>  power_of_two(block=16)
log_sparse()  =>  power_of_two() & causal()
documents([[3, 5], [4, 4]])  =>  documents(((3, 5), (4, 4)))
documents((3, 5), (2, 2))  =>  documents((3, 5), key_lengths=(2, 2))
documents([1]*70)  =>  documents('sha256:..')
documents_from_ids([0, 1, 0, 1], [1, 0, 0, 1])
    =>  documents_from_ids((0, 1, 0, 1), key_ids=(1, 0, 0, 1))
documents_from_ids(np.array([[0, 1, 0, 1], [1, 1, 1, 0]]))
    =>  documents_from_ids(((0, 1, 0, 1), (1, 1, 1, 0)))
cells([3, 4], [[1], np.array([0])])  =>  cells((3, 4), ((1,), (0,)))
frame_causal(16)  =>  block_diagonal(16) | causal()
frame_causal(16, chunk=3)  =>  block_diagonal(48) | causal()
frame_causal(16, np.int64(3), sinks=0)  =>  frame_causal(16, window=3)
hstu(9)  =>  hstu((9,))
hstu([9, 20], [4, 4], context=np.int64(2))  =>  hstu((9, 20), targets=4, context=2)
hstu([[9], [20]], [[4], [5]])  =>  hstu(((9,), (20,)), targets=((4,), (5,)))
prefix_tree([0, 2, 3], np.array([5, 3, 5]))  =>  prefix_tree((0, 2, 3), (5, 3, 5))
prefix_tree(0, 3)  =>  prefix_tree((0,), (3,))
shared_prefix(3, [[4, 5], [2, 7]])  =>  shared_prefix(3, ((4, 5), (2, 7)))
expander(6, 32, per_layer=True).layer(2)  =>  expander(6, 32, per_layer=True, layer=2)
random_blocks(None, count=3, block=16, causal=True, seed=9, per_head=True, per_layer=True)
    =>  random_blocks(count=3, block=16, causal=True, seed=9, per_head=True, per_layer=True)
random_blocks(np.float32(0.5))  =>  random_blocks(0.5)
local_2d((8, 8), (2, 2))  =>  local_2d((8, 8), 2)
axial((4, 5))  =>  local_2d((4, 5), (3, 0)) | local_2d((4, 5), (0, 4))
longformer(32, 2)  =>  dilated(32, 2) | global_at((0,))
etc_(4, 8)  =>  global_tokens(4) | local(8)
neighborhood((8, 8), (3, 5), dilation=(1, 1), stride=(2, 2), causal=(True, False))
    =>  neighborhood((8, 8), (3, 5), stride=2, causal=(True, False))
sliding_tiles((8, 8), 2, (3, 3))  =>  sliding_tiles((8, 8), 2, 3)
streaming(4, 8, align='bottom_right')
    =>  (sinks(4) | sliding(8, align='bottom_right')) & causal(align='bottom_right')
tri_shape(4, 8, 2)  =>  (sinks(4) | sliding(8) | last_rows(2)) & causal()
vertical_slash((3, 1), (0, 4))  =>  (keys_at((1, 3)) | diagonals((0, 4))) & causal()
causal() >> shift(3, 3)  =>  causal() >> shift(3)
causal() >> packed([[3, 4], [5, 2]])  =>  causal() >> packed(((3, 4), (5, 2)))
causal() >> packed([1]*70)  =>  causal() >> packed('sha256:..')
causal() >> snap((16, 16))  =>  causal() >> snap(16)
causal() >> snap((16, 32), 'inward')  =>  causal() >> snap((16, 32), how='inward')
dense() >> permuted([1, 0, 2])  =>  dense() >> permuted((1, 0, 2))
dense() >> permuted(list(range(70)))  =>  dense() >> permuted('sha256:..')
causal()-local(3)  =>  causal() & ~local(3)
parse('natten:16x8:3')  =>  neighborhood((16, 8), 3)
parse('hstu:256:targets=32:window=16')  =>  hstu((256,), targets=32, window=16)
"""


@pytest.mark.parametrize("text", re.split(r"; |\n", CANONICAL.strip()))
def test_a_canonical_text_is_read_back(text: str):
    mask = masks.parse(text)
    assert str(mask) == text and mask == mask_of(text) and mask.spelled
    assert pickle.loads(pickle.dumps(mask)) == mask


@pytest.mark.parametrize(("expression", "text"), rows(OTHERS))
def test_text(expression: str, text: str):
    mask = mask_of(expression)
    assert re.sub("sha256:[0-9a-f]{64}", "sha256:..", str(mask)) == text
    assert mask.spelled == ("sha256" not in text) and pickle.loads(pickle.dumps(mask)) == mask
    if mask.spelled:
        assert masks.parse(str(mask)) == mask
