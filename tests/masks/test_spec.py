"""Masks as text."""

import pytest

import masks
from masks import parse
from masks.registry import PATTERNS, TRANSFORMS
from tests.masks.helpers import rows

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


@pytest.mark.parametrize(("text", "names"), [("x", PATTERNS), ("causal >> x", TRANSFORMS)])
def test_an_unknown_name_lists_the_known_ones(text: str, names: dict):
    with pytest.raises(ValueError, match=r"Known .* SPARSEFLASH_PATTERNS=MODULE") as caught:
        parse(text)
    assert all(name in str(caught.value) for name in names)


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
