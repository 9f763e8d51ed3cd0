"""ListOps: the trees against a plain transcription of LRA's recursion, and the official files."""

import hashlib
from functools import partial
from statistics import median

import numpy as np
import pytest

from experiments.lra.tasks import listops
from experiments.lra.tasks.listops import TOKENS, depth_of, evaluate, generate
from experiments.lra.tasks.task import load_task

# Of 100,000 trees of LRA's own recursion, with the error of that sample left out.
LABELS = [17.2, 9.2, 7.6, 8.0, 9.0, 8.7, 7.7, 7.4, 8.4, 17.0]


@pytest.fixture(scope="module")
def trees():
    return generate(4096, seed=0, workers=1)


def value(words):
    """The value of a list of tokens, which it uses up from the front."""
    word = words.pop(0)
    if word.isdigit():
        return int(word)
    arguments = []
    while words[0] != "]":
        arguments.append(value(words))
    words.pop(0)
    rules = {
        "[MIN": min,
        "[MAX": max,
        "[MED": lambda x: int(median(x)),
        "[SM": lambda x: sum(x) % 10,
    }
    return rules[word](arguments)


def text(words):
    """The binary form of the official files, which uses up `words`."""
    word = words.pop(0)
    if word.isdigit():
        return word
    while words[0] != "]":
        word = f"( {word} {text(words)} )"
    return f"( {word} {words.pop(0)} )"


def ids(words):
    return np.array([1 + TOKENS.index(word) for word in words], np.uint8)


def spelled(trees):
    flat, lengths = trees
    names = np.array(["", *TOKENS])
    return [names[part].tolist() for part in np.split(flat, np.cumsum(lengths)[:-1])]


def test_values_are_those_of_the_plain_recursion(trees):
    some, values = trees
    assert [value(words) for words in spelled(some)[:300]] == values[:300].tolist()
    cases = {"[MED 9 1 2 ]": 2, "[MED 0 9 8 1 ]": 4, "[SM 9 9 9 ]": 7, "[MAX 5 ]": 5}
    rows = [ids(case.split()) for case in cases]
    assert evaluate(np.concatenate(rows)).tolist() == list(cases.values())


def test_lengths_labels_roots_and_depths_are_those_of_lra(trees):
    (flat, lengths), labels = trees
    shares = 100 * np.bincount(labels) / len(labels)
    assert shares.tolist() == pytest.approx(LABELS, abs=2.5)  # four standard errors
    starts = np.cumsum(lengths) - lengths
    roots = 100 * np.bincount(flat[starts] - listops.OPERATOR) / len(labels)
    assert roots.tolist() == pytest.approx([25] * 4, abs=2.8)
    operators = (flat >= listops.OPERATOR) & (flat < listops.CLOSE)
    deepest = np.maximum.reduceat(np.where(operators, depth_of(flat), 0), starts)
    assert (deepest == 9).all()
    assert lengths.mean() == pytest.approx(1035, abs=26)
    assert np.median(lengths) == pytest.approx(956, abs=40)
    assert 501 <= lengths.min() < 505 and 1990 < lengths.max() <= 1999


def test_a_tree_depends_on_seed_and_index_alone(trees):
    (flat, lengths), labels = trees
    for n, workers in ((700, 1), (2048, 2), (4096, 2)):
        (some, sizes), values = generate(n, seed=0, workers=workers)
        assert (sizes == lengths[:n]).all() and (values == labels[:n]).all()
        assert (some == flat[: sizes.sum()]).all()
    assert generate(100, seed=1)[0][1].tolist() != lengths[:100].tolist()


def test_the_stream_of_a_seed_stays_what_it_is(trees):
    (flat, lengths), labels = trees
    data = flat[: lengths[:50].sum()].tobytes() + labels[:50].astype("<i8").tobytes()
    assert hashlib.sha256(data).hexdigest()[:16] == "000e7e2c91d48179"


def test_trees_are_distinct(trees, monkeypatch):
    chunk = listops._chunk
    monkeypatch.setattr(listops, "_chunk", lambda seed, index: chunk(seed, 0))
    some, values = generate(600, seed=0)
    parts = spelled(some)
    assert len({" ".join(part) for part in parts}) == 600
    assert [value(part) for part in parts[512:]] == values[512:].tolist()


def test_a_generated_task_is_cached_and_says_so(tmp_path):
    sizes = {"examples": [40, 10, 20], "generate": True}
    load = partial(load_task, "listops", tmp_path, cache_dir=tmp_path / "cache", **sizes)
    task = load()
    assert (task.source, task.length, task.vocab) == ("generated, 40 + 10 + 20 examples", 2048, 16)
    assert [len(task.splits[name]) for name in ("train", "val", "test")] == [40, 10, 20]
    assert task.baselines.keys() == {"majority", "root operator"}
    train = task.splits["train"]
    for row, n in zip(train.tokens, train.lengths, strict=True):
        assert row[:n].all() and not row[n:].any()
    np.testing.assert_array_equal(load().splits["test"].tokens, task.splits["test"].tokens)
    few = load(limit=3, max_length=600).splits["train"]
    assert few.tokens.shape == (3, 1024) and not few.tokens[:, 600:].any()
    assert few.lengths.max() <= 600
    assert len(list((tmp_path / "cache").iterdir())) == 1


# ---- official files


@pytest.fixture
def release(tmp_path, trees):
    """A small listops-1000 in the official form, and its trees."""
    folder = tmp_path / "lra_release" / "lra_release" / "listops-1000"
    folder.mkdir(parents=True)
    some = spelled(trees[0])[:30]
    for i, name in enumerate(("train", "val", "test")):
        rows = [f"{text(list(words))}\t{value(list(words))}" for words in some[i::3]]
        lines = ["Source\tTarget", *rows, ""]
        (folder / f"basic_{name}.tsv").write_bytes("\r\n".join(lines).encode())
    return tmp_path, folder, some


def load(release):
    return load_task("listops", release[0], cache_dir=release[0] / "cache")


def test_official_files_are_read_as_the_trees_they_were_written_from(release):
    task = load(release)
    assert task.source == "official, 10 + 10 + 10 examples"
    for i, name in enumerate(("train", "val", "test")):
        split = task.splits[name]
        for row, n, label, words in zip(
            split.tokens, split.lengths, split.labels, release[2][i::3], strict=True
        ):
            assert row[:n].tolist() == ids(words).tolist() and label == value(list(words))
    again = load(release)
    np.testing.assert_array_equal(again.splits["val"].tokens, task.splits["val"].tokens)
    (release[1] / "basic_test.tsv").write_text("Source\tTarget\n( ( [MIN 3 ) ] )\t3\n")
    assert load(release).splits["test"].labels.tolist() == [3]  # a changed file is read again


def test_a_corrupt_row_is_named_and_nothing_is_cached(release):
    path = release[1] / "basic_val.tsv"
    whole = path.read_text().splitlines()
    for line in ("( ( [MIN 3 ) ] )\t12", "( ( [MIN 3 ) ] )", "\t3", "", "( ( [AVG 3 ) ] )\t3"):
        path.write_text("\n".join([*whole[:3], line, *whole[4:]]))
        with pytest.raises(ValueError, match=r"basic_val\.tsv, line 4"):
            load(release)
    path.write_bytes(b"")
    with pytest.raises(ValueError, match=r"basic_val\.tsv, line 1"):
        load(release)
    assert not (release[0] / "cache").exists()
