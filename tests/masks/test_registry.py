"""What follows from the registration of a pattern: text, identity, examples, counts, exactness."""

import pickle

import numpy as np
import pytest

import masks
from masks.registry import PATTERNS, TRANSFORMS, Entry, Example, canonical
from tests.masks.helpers import brute_dense, check, mask_of
from tests.masks.test_build import Checkers

N, NINE = 256, (9, 9)
ENTRIES = {entry.function.__name__: entry for entry in (PATTERNS | TRANSFORMS).values()}
EXAMPLES = [example for entry in ENTRIES.values() for example in entry.examples]


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_everything_has_an_example_and_a_docstring(entry: Entry):
    assert entry.examples and entry.function.__doc__
    assert all(entry.function.__name__ in example.code for example in entry.examples)


@pytest.mark.usefixtures("no_cache")
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.code[:40])
def test_example(example: Example):
    """Its count, its text, and its tiles by the definition of the tests."""
    mask = mask_of(example.code)
    heads = 2 if mask.per_head else None
    blocks = mask.build(N, block_size=(16, 32), heads=heads)
    if example.count:
        count = eval(example.count, {"N": N, **example.given})
        assert blocks.to_dense()[0, example.head % blocks.heads].sum() == count
    check(mask, blocks, brute_dense(mask, N, N, blocks.batch, blocks.heads))
    if mask.spelled:
        for again in (masks.parse(str(mask)), pickle.loads(pickle.dumps(mask))):
            assert again == mask and again.build(N, block_size=(16, 32), heads=heads) == blocks
    if "where" not in example.code:
        again = mask_of(example.code)
        assert again == mask and hash(again) == hash(mask)


@pytest.fixture
def spots(own_patterns: None):
    @masks.pattern(written=1)
    def spots(size: int = 8, gap=(1, 2), *, shape: str = "round", seed: int | None = 0):
        return canonical(Checkers(), gap=9 if gap is NINE else gap)

    return spots


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((), {}, "spots(8)"),
        ((8, (1, 2)), {"shape": "round", "seed": 0}, "spots(8)"),
        ((np.int64(9),), {}, "spots(9)"),
        ((), {"size": 9, "seed": None}, "spots(9, seed=None)"),
        ((8, [3, 4]), {"shape": "flat"}, "spots(8, gap=(3, 4), shape='flat')"),
        ((8,), {"gap": np.array([[3], [4]])}, "spots(8, gap=((3,), (4,)))"),
        ((8, NINE), {}, "spots(8, gap=9)"),
    ],
)
def test_the_text_follows_from_the_arguments(spots, args: tuple, options: dict, text: str):
    mask = spots(*args, **options)
    assert str(mask) == text and mask.kind == "spots" and mask.spelled
    assert masks.parse(text) == mask and mask.again() == mask
    assert str(mask.again(seed=7)) == text[:-1] + ", seed=7)" or options.get("seed", 1) is None
    assert mask.arguments["shape"] == options.get("shape", "round")


@pytest.mark.usefixtures("own_patterns")
def test_long_arguments_are_a_digest_where_that_is_asked_for():
    @masks.pattern(digest=True)
    def listed(numbers):
        return Checkers()

    short, long = listed(range(64)), listed(list(range(65)))
    assert short.spelled and not long.spelled and "sha256:" in str(long)
    assert long == listed(np.arange(65)) and long != listed(list(range(1, 66)))


def test_what_names_no_mask_is_refused(own_patterns: None):
    with pytest.raises(ValueError, match=r"missing its parentheses: write @masks\.pattern\(\)"):
        masks.pattern(lambda n: masks.local(n))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'<lambda>' is no name for a text"):
        masks.pattern()(lambda n: masks.local(n))

    @masks.pattern()
    def forgets(n):
        masks.local(n)

    with pytest.raises(ValueError, match="forgets gives None: return a mask"):
        forgets(3)


@pytest.mark.usefixtures("own_patterns")
def test_a_pattern_that_is_defined_again_is_built_again():
    counts = []
    for width in (1, 2):  # as when a notebook runs a cell again

        @masks.pattern()
        def own(size: int, width: int = width):
            return masks.where(lambda q, k: abs(q - k) < width * size)

        mask = own(1)
        assert str(mask) == "own(1)"
        counts.append(int((mask | masks.sinks(1)).build(20, block_size=16).to_dense().sum()))
    assert counts == [20 + 19, 20 + 2 * 19 + 18]
