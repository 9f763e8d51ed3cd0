"""Files that are there whole or not at all, and what is read of damaged ones."""

import bz2
import gzip
import io
import json
import lzma
import tarfile

import numpy as np
import pytest
import torch
from matplotlib import pyplot as plt

from experiments.common import files
from experiments.common.figures import save
from experiments.common.files import write_whole
from experiments.training import state as checkpoint


def test_what_does_not_fit_the_disk_leaves_the_old_file_and_says_so(tmp_path, full_disk):
    """torch.save hides what the system says behind an error of its own."""
    path, tensor = tmp_path / "some.png", torch.zeros(2**16)
    path.write_bytes(b"old")
    for write in (
        lambda: write_whole(path, lambda file: torch.save(tensor, file), "plots"),
        lambda: save(plt.figure(), tmp_path / "some", option="plots"),
    ):
        with (
            full_disk(100),
            pytest.raises(ValueError, match=r"cannot write .*File too.*with plots="),
        ):
            write()
        assert list(tmp_path.iterdir()) == [path] and path.read_bytes() == b"old"
    with pytest.raises(ValueError, match=r"cannot write .*png/new .*another place with out="):
        write_whole(path / "new", lambda file: None, "out")


# ---- reading


def made(write, *values, **named):
    file = io.BytesIO()
    write(file, *values, **named)
    return file.getvalue()


STATE, VALUES = {"a": 1, "format": checkpoint.FORMAT}, {"a": np.arange(3)}
TABLE, JSON = {"a": [1, 2.5]}, b'{"a": [1, 2.5]}\n'
KINDS = {  # of files: their reader, a whole file, and what is in it
    "json": (files.read_json, JSON, TABLE),
    "jsonl": (files.read_json_lines, JSON * 2, [TABLE, TABLE]),
    "jsonl.gz": (files.read_json_lines, gzip.compress(JSON * 2), [TABLE, TABLE]),
    "jsonl.bz2": (files.read_json_lines, bz2.compress(JSON * 2), [TABLE, TABLE]),
    "yaml": (files.read_yaml, b"a:\n- 1\n- 2.5\n", TABLE),
    "npz": (files.read_arrays, made(np.savez, **VALUES), VALUES),
    "npz.xz": (files.read_arrays, lzma.compress(made(np.savez, **VALUES)), VALUES),
    "npy": (files.read_array, made(np.save, VALUES["a"]), VALUES["a"]),
    "pt": (checkpoint.load, made(lambda file: torch.save(STATE, file)), STATE),
}


def refused(read, path):
    """The error of a file: one line with its name, the remedy and no advice of a library."""
    with pytest.raises(ValueError) as error:
        read(path, "fix it")
    told = str(error.value)
    assert told.startswith(str(path)) and told.endswith(": fix it") and "\n" not in told
    assert not any(word in told for word in ("allow_pickle", "weights_only", "sys.", "Errno"))
    return told


@pytest.mark.parametrize("kind", KINDS)
def test_damage_anywhere_is_one_error(tmp_path, kind):
    read, whole, content = KINDS[kind]
    path = tmp_path / f"some.{kind}"
    path.write_bytes(whole)
    np.testing.assert_equal(read(path, "fix it"), content)
    rng, errors = np.random.default_rng(0), 0
    for _ in range(150):
        data = bytearray(whole)
        if rng.random() < 0.3:
            del data[rng.integers(len(data)) :]
        for place in rng.integers(len(data), size=3) if data else ():
            data[place] = rng.integers(256)
        path.write_bytes(data)
        try:
            read(path, "fix it")
        except ValueError:
            errors += bool(refused(read, path))
    assert errors > 20
    path.unlink()
    assert "No such file" in refused(read, path)


DEEP, DIGITS = "[" * 10_000, "1" * 5000


@pytest.mark.parametrize(
    ("kind", "content", "words"),
    [
        ("json", DEEP.encode(), "nested too deeply"),
        ("json", f'{{"a": {DIGITS}}}'.encode(), "digits"),
        ("yaml", DEEP.encode(), "nested too deeply"),
        ("yaml", f"a: {DIGITS}".encode(), "digits"),
        ("yaml", b"a: !!python/object/apply:os.getcwd []", "could not determine a constructor"),
        ("npz", made(np.savez, a=np.array([{}], object)), "is not an npz file"),
        ("npy", made(np.save, np.array([{}], object)), "is not a NumPy file"),
        ("pt", made(lambda file: torch.save(tarfile.TarInfo, file)), "is not a checkpoint"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_no_file_of_ours_holds_is_refused(tmp_path, kind, content, words):
    path = tmp_path / f"some.{kind}"
    path.write_bytes(content)
    assert words in refused(KINDS[kind][0], path)


def test_lines_have_no_mark_before_and_no_blank_lines_after_them(tmp_path):
    path = tmp_path / "some.tsv"
    path.write_bytes(b"\xef\xbb\xbfa\tb\r\nc\n\n \r\n")
    assert list(files.read_lines(path, "fix it")) == [(1, b"a\tb"), (2, b"c")]
    path.write_bytes(b"a\n\nb\n")
    assert "line 2 is blank" in refused(lambda *given: list(files.read_lines(*given)), path)
    path.write_bytes(b"\xef\xbb\xbf" + json.dumps(TABLE).encode())
    assert files.read_json(path, "") == TABLE == files.read_json_lines(path, "")[0]


def test_half_a_last_line_is_left_out_of_a_journal(tmp_path):
    path = tmp_path / "some.jsonl"
    path.write_bytes(JSON + JSON[:-3])
    assert files.read_json_lines(path, "fix it", cut=True) == [TABLE]
    path.write_bytes(JSON[:-3] + b"\n" + JSON)
    with pytest.raises(files.DamagedFile, match="line 1"):
        files.read_json_lines(path, "fix it", cut=True)
