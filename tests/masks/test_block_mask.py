"""BlockMask: lists, files, identity, what it refuses."""

import dataclasses
import pickle
import random
from pathlib import Path

import numpy as np
import pytest

import masks
from masks import BlockLists, BlockMask
from tests.masks.helpers import any_blocks
from tests.notes import each_seed


def layout_of(lists: BlockLists, shape: tuple[int, int, int]) -> np.ndarray:
    """Dense tile codes (slices, lines, others) of the lists, after checking their order."""
    slices, lines, others = shape
    codes = np.full((slices * lines, others), -2)
    for line in range(slices * lines):
        begin, middle, end = lists.ptr[line], lists.mid[line], lists.ptr[line + 1]
        assert begin <= middle <= end
        for kind in (slice(begin, middle), slice(middle, end)):
            assert (np.diff(lists.idx[kind]) > 0).all()
        assert (lists.tile[begin:middle] >= 0).all() and (lists.tile[middle:end] == -1).all()
        codes[line, lists.idx[begin:end]] = lists.tile[begin:end]
    return codes.reshape(shape)


@each_seed(30)
def test_lists_hold_the_layout(seed: int):
    blocks = any_blocks(random.Random(seed))
    slices = blocks.batch * blocks.heads
    by_row = layout_of(blocks.csr(), (slices, blocks.rows, blocks.cols))
    by_col = layout_of(blocks.csc(), (slices, blocks.cols, blocks.rows))
    kinds = np.select([by_row == -2, by_row == -1], [0, 2], 1)
    assert np.array_equal(kinds.reshape(blocks.layout().shape), blocks.layout())
    assert np.array_equal(by_row, by_col.swapaxes(1, 2))
    for lists in (blocks.csr(), blocks.csc()):
        assert [x.dtype for x in lists] == [np.int64, np.int64, np.int32, np.int32]
        assert len(lists.idx) == len(lists.tile) == blocks.nnz == lists.ptr[-1]
    assert blocks.nnz == (blocks.layout() > 0).sum()
    assert blocks.density == (blocks.layout() > 0).mean()
    given = {"block_size": blocks.block_size, "n_q": blocks.n_q, "n_k": blocks.n_k}
    whole = BlockMask.from_layout(blocks.layout(), **given)
    assert np.array_equal(whole.layout(), 2 * (blocks.layout() > 0))


@each_seed(10)
def test_identity_is_by_content(seed: int, tmp_path: Path):
    blocks = any_blocks(random.Random(seed))
    again = BlockMask.from_dense(blocks.to_dense(), blocks.block_size)
    if blocks.heads == again.heads:  # from_dense keeps an extent of 1 only
        assert again == blocks and again.key == blocks.key and hash(again) == hash(blocks)
    blocks.save(tmp_path / "mask")
    loaded = BlockMask.load(tmp_path / "mask")
    assert loaded == blocks and loaded.text == blocks.text
    copy = pickle.loads(pickle.dumps(blocks))
    assert copy == blocks and not copy.starts.flags.writeable


def test_every_field_counts():
    blocks = masks.causal().build(64, block_size=32)
    assert blocks != masks.causal().build(64, 63, 32)
    assert blocks != masks.causal().build(64, block_size=(32, 64))
    assert blocks != dataclasses.replace(blocks, heads=1, batch=1, bits=blocks.bits ^ np.uint32(1))
    assert blocks == dataclasses.replace(blocks, text="another way to say it")


def test_key_is_stable():
    """The key names results on disk: a change of it is a change of the format."""
    blocks = (masks.local(40) | masks.butterfly(32)).build(200, 190, (32, 48))
    assert blocks.key == "f4496f54059fc6a817edc12bd04c2372bbc51957ec40381176a808a541deb394"


def test_bits():
    bits = masks.local(0).build(50, block_size=(16, 48)).bits
    assert bits.shape == (4, 16, 2) and bits.dtype == np.uint32
    assert bits[0, :, 0].tolist() == [1 << i for i in range(16)]
    assert bits[1, :, 0].tolist() == [1 << 16 + i for i in range(16)]
    assert bits[2, :, 1].tolist() == [1 << i for i in range(16)]
    assert bits[3].tolist() == [[1, 0], [2, 0]] + 14 * [[0, 0]]  # rows 48 and 49, columns 48 and 49


def test_read_only():
    blocks = masks.causal().build(64)
    with pytest.raises(ValueError, match="read-only"):
        blocks.starts[0] = 1
    with pytest.raises(AttributeError):
        blocks.n_q = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_q": 0}, "n_q is 0"),
        ({"block_size": (40, 32), "bits": np.zeros((1, 40, 1), np.uint32)}, "block_size is 40"),
        ({"starts": np.array([0, 3])}, r"starts \(2,\), tiles"),
        ({"starts": np.array([1, 2, 3])}, "ascend from 0"),
        ({"starts": np.array([0, 1, 4])}, "stay below 4"),
        ({"tiles": np.array([0, -2, 1], np.int32)}, "between -2 and 0"),
        ({"tiles": np.array([0, -2, -2], np.int32)}, "join them"),
        ({"bits": np.zeros((1, 32, 2), np.uint32)}, "bits have shape"),
    ],
)
def test_refuses(change: dict, message: str):
    blocks = masks.causal().build(64, block_size=32)
    fields = {f.name: getattr(blocks, f.name) for f in dataclasses.fields(blocks) if f.init} | {
        "starts": np.array([0, 1, 2]),
        "tiles": np.array([0, -2, -1], np.int32),
    }
    BlockMask(**fields)
    with pytest.raises(ValueError, match=message):
        BlockMask(**(fields | change))


def rewritten(path: Path, **changes: object) -> Path:
    """The file with some of its entries changed."""
    with np.load(path) as file:
        content = {name: file[name] for name in file.files} | changes
    np.savez_compressed(path, **content)  # type: ignore[arg-type]
    return path


CHANGED = r"was changed .* with BlockMask\.save"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n_q": 99}, CHANGED),
        ({"starts": np.array([5])}, CHANGED),
        ({"format": 1}, "has format 1, and this version reads 2: write it again"),
    ],
)
def test_a_changed_file_is_refused(tmp_path: Path, changes: dict, message: str):
    path = tmp_path / "mask.npz"
    masks.local(3).build(100, 100, 32).save(path)
    with pytest.raises(ValueError, match=rf"mask\.npz {message}"):
        BlockMask.load(rewritten(path, **changes))


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04broken", "array", "other"])
def test_another_file_is_refused(tmp_path: Path, content: bytes | str):
    path = tmp_path / "mask.npz"
    if content == "array":
        np.save(path.with_suffix(".npy"), np.zeros(3))
        path = path.with_suffix(".npy")
    elif content == "other":
        np.savez(path, starts=np.zeros(3))
    else:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=r"mask\.np[yz] is no block mask.*: write"):
        BlockMask.load(path)


@pytest.mark.parametrize("picture", [False, True])
def test_a_full_disk_leaves_the_older_file(picture: bool, tmp_path: Path, full_disk):
    if picture:
        pytest.importorskip("matplotlib")
    path, blocks = tmp_path / "mask.png", masks.random_blocks(0.5).build(1 << 12)
    path.write_bytes(b"old")
    with full_disk(1000), pytest.raises(OSError, match=r"File too large.*mask\.png"):
        (blocks.draw if picture else blocks.save)(path)
    assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"


def test_one_wrong_byte_is_refused_or_does_not_count(tmp_path: Path):
    path, blocks = tmp_path / "mask.npz", masks.local(3).build(100)
    blocks.save(path)
    whole = path.read_bytes()
    refused = 0
    for at in range(0, len(whole), 29):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            assert BlockMask.load(path) == blocks
        except ValueError as error:
            assert "mask.npz" in str(error)
            refused += 1
    assert refused > 20
