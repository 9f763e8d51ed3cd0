"""The kernels that make masks of packed sequences against plain torch, bit for bit."""

import numpy as np
import pytest
import torch

from sparseflash import packed
from sparseflash.dynamic.lists import schedule_from_selection
from sparseflash.packed import blocks, spans
from sparseflash.schedule.tile_lists import tile_lists
from sparseflash.schedule.tile_spec import TileSpec

kernels = pytest.importorskip("sparseflash.packed.kernels")
in_torch = blocks.span_blocks.__wrapped__  # pyright: ignore

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = [16, 32, 48, 64, 80, 128, 256]


@pytest.fixture(autouse=True)
def small_programs(monkeypatch):
    """Several programs and steps for small problems too."""
    monkeypatch.setattr(kernels, "_ENTRIES", 4)
    monkeypatch.setattr(kernels, "_LINES", 8)
    monkeypatch.setattr(blocks, "_CHUNK", 2**13)


def assert_equal(found, expected):
    assert found.dtype == expected.dtype and found.is_contiguous()
    assert found.shape == expected.shape and torch.equal(found, expected)


def offsets_of(rng: np.random.Generator, end: int) -> torch.Tensor:
    """(batch, documents + 1), ascending from 0 to at most `end`; documents may have no tokens."""
    batch, count = int(rng.integers(1, 4)), int(rng.choice([1, 2, 3, 7, 40]))
    unit = int(rng.choice([1, 1, 16]))
    cuts = np.sort(rng.integers(0, end // unit + 1, (batch, count)) * unit, 1)
    if rng.integers(2):
        cuts[:, -1] = end
    cuts = np.concatenate([np.zeros((batch, 1), np.int64), cuts], 1)
    return torch.from_numpy(cuts).to(DEVICE, (torch.int32, torch.int64)[rng.integers(2)])


def documents_case(rng: np.random.Generator):
    n = int(rng.integers(1, 400))
    # beyond n, which nobody waits to refuse on a GPU, nothing exists
    offsets, shared = offsets_of(rng, n + int(rng.choice([0, 0, 30]))), bool(rng.integers(2))
    left, right = (int(rng.choice([0, 3, 70, n])) for _ in range(2))
    length = lengths = None
    if (kind := rng.integers(3)) == 1:
        length = int(rng.integers(0, 30))
    elif kind == 2:
        shape = int(rng.choice([1, len(offsets)])), offsets.shape[1] - 1
        lengths = torch.from_numpy(rng.integers(0, 30, shape)).to(DEVICE)
    offsets_k, n_k = None, n
    if rng.integers(2):
        n_k = int(rng.integers(1, 400))
        offsets_k = torch.from_numpy(rng.integers(0, n_k + 1, offsets.shape)).sort(1).values
        offsets_k = (offsets_k * (torch.arange(offsets.shape[1]) > 0)).to(DEVICE)
    sides = left, right, shared
    return "document_spans", (offsets, offsets_k, n, n_k, *sides, length, lengths)


def diffusion_case(rng: np.random.Generator):
    half = int(rng.integers(1, 200))
    size = min(half, int(rng.choice([1, 3, 16, 32, 100])))
    return "diffusion_spans", (offsets_of(rng, half), 2 * half, size, bool(rng.integers(2)))


def tree_case(rng: np.random.Generator):
    """Ends that are those of a walk or, as good as others here, of none."""
    n = int(rng.integers(1, 400))
    enter = offsets_of(rng, n)
    leave = (enter + torch.from_numpy(rng.integers(0, n + 1, enter.shape)).to(enter)).clamp(max=n)
    if rng.integers(2):  # long columns of equal blocks
        leave[:, : enter.shape[1] // 2] = n
    return "tree_spans", (enter, leave, n)


def tokens_of_the_other_side(name: str, given: tuple, spans: torch.Tensor) -> int:
    """What the spans lie in: keys of their own for documents, else the tokens that have them."""
    return given[3] if name == "document_spans" else spans.shape[3]


CASES = {"documents": documents_case, "diffusion": diffusion_case, "trees": tree_case}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_spans_as_in_torch(case):
    rng = np.random.default_rng(0)
    for _ in range(12):
        name, given = case(rng)
        assert_equal(getattr(kernels, name)(*given), getattr(spans, name).__wrapped__(*given))


@pytest.mark.parametrize("case", [documents_case, tree_case])
def test_tensors_of_any_strides(case):
    def strided(given):
        return [x.repeat_interleave(2, -1)[..., ::2] if torch.is_tensor(x) else x for x in given]

    name, given = case(np.random.default_rng(1))
    made = getattr(kernels, name)(*given)
    assert_equal(getattr(kernels, name)(*strided(given)), made)
    shape = tokens_of_the_other_side(name, given, made), 32, 32, 9, case is tree_case
    found, expected = (kernels.span_blocks(x, *shape) for x in (*strided([made]), made))
    for a, b in zip(found, expected, strict=True):
        assert_equal(a, b)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_same_blocks_as_in_torch(case, monkeypatch):
    rng = np.random.default_rng(0)
    for number in range(4):
        if number == 3:  # programs as large as they are
            monkeypatch.undo()
        name, given = case(rng)
        made, columns = getattr(spans, name)(*given), case is tree_case
        block_q, block_k = (int(x) for x in rng.choice(SIZES, 2))
        n_other = tokens_of_the_other_side(name, given, made)
        blocks_of_mask = len(given[0]) * -(-n_other // block_q) * -(-n_other // block_k)
        room = int(rng.integers(1, min(blocks_of_mask, 60) + 1))  # too little at times
        shape = n_other, block_q, block_k, room, columns
        found, expected = kernels.span_blocks(made, *shape), in_torch(made, *shape)
        for a, b in zip(found, expected, strict=True):
            assert_equal(a, b)


MASKS = {
    "documents": lambda offsets, n: packed.documents(
        offsets, n, causal=True, shared=True, window=60, prefix=3
    ),
    "tree": lambda offsets, n: packed.prefix_tree(offsets[:, :-1], offsets[:, 1:], n),
    "streams": lambda offsets, n: packed.block_diffusion(offsets, n, 32),
}


@pytest.mark.skipif(DEVICE == "cuda", reason="pretends that the CPU is a GPU")
@pytest.mark.parametrize("make", MASKS.values(), ids=MASKS)
def test_kernels_make_a_mask_and_its_lists(make, monkeypatch):
    """From the offsets to the tile lists of a plan."""
    n, offsets = 200, torch.tensor([[0, 40, 76, 100], [0, 0, 13, 96]])

    def run():
        mask = make(offsets, n)
        schedule = schedule_from_selection(mask, n, n, 2, 4, "cpu")
        specs = (TileSpec(by_rows, 128, 64, n, n, 2, 4, 2, 132) for by_rows in (True, False))
        lists = [tile_lists(schedule, spec, "cpu") for spec in specs]
        return mask, lists

    expected, expected_lists = run()
    monkeypatch.setattr("sparseflash.packed.spans.readable", lambda _: False)
    monkeypatch.setattr("sparseflash.packed.sequences.readable", lambda _: False)
    monkeypatch.setattr("sparseflash.operators.twin.on_nvidia", lambda _: True)
    found, found_lists = run()
    assert_equal(found.codes, expected.codes)
    assert_equal(found.bits, expected.bits)
    for one, other in zip(found_lists, expected_lists, strict=True):
        assert one.numbers == other.numbers
        for a, b in zip(one.tensors, other.tensors, strict=True):
            assert_equal(a, b)
