"""Masks as text."""

import pytest

import masks
from masks import Mask, parse
from masks.spec import PATTERNS

local, butterfly, global_, causal = (
    masks.local(256),
    masks.butterfly(128),
    masks.global_tokens(64),
    masks.causal(),
)


@pytest.mark.parametrize(
    ("text", "mask"),
    [
        ("local:256+butterfly:128+global:64*causal", local | butterfly | (global_ & causal)),
        ("local(256) | butterfly(128) & causal()", local | (butterfly & causal)),
        ("(local:256+butterfly)*causal", (local | butterfly) & causal),
        ("local:256+butterfly&causal", (local | butterfly) & causal),
        ("local:256|butterfly&causal", local | (butterfly & causal)),
        ("dense-causal-local:256", masks.dense() - causal - local),
        ("~causal | ~(global(64))", ~causal | ~global_),
        ("  local ( 256 )\n|\tcausal ", local | causal),
        ("local:1:2", masks.local(1, 2)),
        ("local:left=1:right=2:align=bottom_right", masks.local(1, 2, align="bottom_right")),
        ("local(1, align='bottom_right')", masks.local(1, align="bottom_right")),
        ("sliding:4096-global_tokens:64", masks.sliding(4096) - global_),
        ("butterfly:64:none+causal:align=top_left", masks.butterfly(64) | causal),
        ("random:0.1", masks.random_blocks(0.1)),
        ("random:1e-3", masks.random_blocks(0.001)),
        ("random:.5:seed=3:per_head=true", masks.random_blocks(0.5, seed=3, per_head=True)),
        ("random_blocks(None, count=3)-local:256", masks.random_blocks(count=3) - local),
    ],
)
def test_parse(text: str, mask: Mask):
    assert parse(text) == mask


@pytest.mark.parametrize(
    ("text", "position", "problem"),
    [
        ("", 0, "does not read"),
        ("local:256 + ", 12, "does not read"),
        ("local:256 + lokal:3", 12, "unknown pattern 'lokal'"),
        ("global:3 + (causal", 11, "does not read"),
        ("causal + global:-4", 9, "n is -4"),
        ("causal + local", 9, "missing 1 required positional argument: 'left'"),
        ("local(2, wide=3)", 0, "unexpected keyword argument 'wide'"),
        ("global:64 + causal and local:3", 0, "use a pattern, | & ~ -"),
        ("not causal", 0, "use a pattern"),
        ("causal / local:3", 0, "use a pattern"),
        ("global:64 | 3", 12, "use a pattern"),
        ("local(2 + 3)", 6, "arguments are constants"),
        ("local([3])", 6, "arguments are constants"),
        ("local(**{'left': 3})", 0, r"\*\* has no place"),
        ("causal | mask_from((2, 2), 'x')", 9, "array mask has no text"),
        ("masks.causal()", 0, "use a pattern"),
        ("__import__('os').system('true')", 0, "use a pattern"),
        ("(lambda: 0)()", 0, "use a pattern"),
        ("causal; causal", 6, "does not read"),
        ("local:2.5", 0, "left is 2.5"),
        ("causal:top", 0, "takes 0 positional arguments"),
    ],
)
def test_errors_have_position_and_names(text: str, position: int, problem: str):
    with pytest.raises(ValueError, match=problem) as caught:
        parse(text)
    message = str(caught.value)
    assert f"position {position} " in message
    assert all(name in message for name in PATTERNS)


def test_not_a_string():
    with pytest.raises(ValueError, match="give a str"):
        parse(causal)  # type: ignore[arg-type]


def test_every_pattern_is_public():
    for name, function in PATTERNS.items():
        assert getattr(masks, function.__name__) is function, name
    short = {"local", "sliding", "causal", "butterfly", "random", "global", "dense"}
    assert short <= set(PATTERNS)
