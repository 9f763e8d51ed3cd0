"""The Pathfinder task: released folders read, and images generated."""

import os
import shutil

import numpy as np
import pytest
from PIL import Image

from experiments.lra.tasks import pathfinder
from experiments.lra.tasks.pathfinder import STREAM, load, read_metadata
from experiments.lra.tasks.task import pixel_order
from experiments.pathfinder.generate import make
from experiments.pathfinder.geometry import LEVELS, spec

N = 40
LINE = "imgs/0 sample_0.png 0 1 1.0 14 4 2 0.5 1 1\n"


def write(out, spec, seed, n):
    """Write generated images as the release has them: PNG files, and a line of text for each."""
    level = out / f"pathfinder{spec.size}" / LEVELS[spec.contour]
    for name in ("imgs/0", "metadata"):
        (level / name).mkdir(parents=True)
    images, lines = make(spec, seed, 0, n), []
    for i, (pixels, label) in enumerate(zip(images.pixels, images.labels, strict=True)):
        Image.fromarray(pixels).save(level / f"imgs/0/sample_{i}.png")
        lines.append(f"imgs/0 sample_{i}.png {i} {label} 1.0 {spec.contour} 4 2 0.5 1 1\n")
    (level / "metadata" / "0.npy").write_text("".join(lines))


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    out = tmp_path_factory.mktemp("release")
    write(out, spec(32), 0, N)
    write(out, spec(32, 6), 0, N)
    return out


@pytest.fixture
def release(written, tmp_path):
    shutil.copytree(written, tmp_path / "lra")
    return tmp_path / "lra"


def level_of(release):
    return release / "pathfinder32" / "curv_contour_length_14"


def read(release, tmp_path, **options):
    return load(32, release, cache_dir=tmp_path / "cache", **options)


def test_strokes_gaps_and_distractors_are_for_images_that_are_made(release, tmp_path):
    with pytest.raises(ValueError, match="strokes=0 needs generate=true"):
        read(release, tmp_path, strokes=0)
    with pytest.raises(ValueError, match="difficulty=10: choose from 6, 9, 14"):
        read(release, tmp_path, difficulty=10)
    options = {"cache_dir": tmp_path, "generate": True, "examples": (4, 2, 2)}
    drawn = ({}, {"margins": [3, 2]}, {"strokes": 128}, {"margins": 1}, {"distractors": 0})
    plain, *sets = (load(128, tmp_path, **options, **one).splits["train"].tokens for one in drawn)
    same = [np.array_equal(plain, other) for other in sets]
    assert same == [True, True, False, False]  # those of the release
    assert np.count_nonzero(sets[3]) < np.count_nonzero(plain)


def test_images_have_several_strokes_in_turn(tmp_path):
    def made(strokes):
        options = {"generate": True, "examples": (7, 2, 2), "difficulty": 6, "order": "tiles:8"}
        task = load(64, tmp_path, cache_dir=tmp_path, strokes=strokes, **options)
        return task.splits["train"].tokens

    kinds = [None, 128, 200.5]
    alone = [made(kind) for kind in kinds]
    for i, image in enumerate(made(kinds)):
        same = [np.array_equal(image, tokens[i]) for tokens in alone]
        assert same == [i % 3 == which for which in range(3)]
    with pytest.raises(ValueError, match="strokes=\\[\\]: give at least one"):
        made([])


def test_what_was_written_is_read(release, tmp_path):
    task, images = read(release, tmp_path), make(spec(32), 0, 0, N)
    assert (task.name, task.grid) == ("pathfinder32", (32, 32))
    assert task.source == "official, 32 + 4 + 4 examples"
    assert [len(split) for split in task.splits.values()] == [32, 4, 4]
    tokens = np.concatenate([split.tokens for split in task.splits.values()])
    labels = np.concatenate([split.labels for split in task.splits.values()])
    np.testing.assert_array_equal(tokens, images.pixels.reshape(N, -1))
    np.testing.assert_array_equal(labels, images.labels)
    assert (labels.dtype, tokens.dtype) == (np.int64, np.uint8)
    test = task.splits["test"].labels
    assert task.baselines["majority"] in (test.mean(), 1 - test.mean())
    line = (level_of(release) / "metadata" / "0.npy").read_text().splitlines()[3]
    assert line == f"imgs/0 sample_3.png 3 {images.labels[3]} 1.0 14 4 2 0.5 1 1"
    files = sorted((tmp_path / "cache").iterdir())
    again = read(release, tmp_path).splits["val"].tokens  # the second time from the cache
    np.testing.assert_array_equal(again, task.splits["val"].tokens)
    assert sorted((tmp_path / "cache").iterdir()) == files


def test_the_cache_follows_the_images(release, tmp_path):
    """Neither another release with the same metadata nor a new image gets the old pixels."""

    def replace(root, value):
        image = level_of(root) / "imgs" / "0" / "sample_3.png"
        later = image.stat().st_mtime_ns + 1
        Image.fromarray(np.full((32, 32), value, np.uint8)).save(image)
        os.utime(image, ns=(later, later))

    def third(root):
        return set(read(root, tmp_path).splits["train"].tokens[3].tolist())

    shutil.copytree(release, tmp_path / "other")
    before = third(release)
    replace(tmp_path / "other", 98)
    assert third(tmp_path / "other") == {98} and third(release) == before
    replace(release, 99)
    assert third(release) == third(release) == {99}


def test_folders_come_in_the_order_of_their_numbers(release, tmp_path):
    level = level_of(release)
    for k in (2, 10):
        shutil.copytree(level / "imgs" / "0", level / "imgs" / str(k))
        lines = (level / "metadata" / "0.npy").read_text().splitlines()
        text = "\n".join(line.replace("imgs/0", f"imgs/{k}") for line in lines)
        (level / "metadata" / f"{k}.npy").write_text(text)
    Image.fromarray(np.full((32, 32), 7, np.uint8)).save(level / "imgs" / "10" / "sample_39.png")
    task = read(release, tmp_path)
    assert [len(split) for split in task.splits.values()] == [96, 12, 12]
    assert (task.splits["test"].tokens[-1] == 7).all()
    assert read_metadata(level / "metadata" / "10.npy")[5][0] == "imgs/10/sample_5.png"


def test_the_known_empty_image_is_left_out(release, tmp_path):
    level = release / "pathfinder32" / "curv_baseline"
    metadata = level / "metadata" / "0.npy"
    metadata.write_text(metadata.read_text().replace("sample_7.png", "sample_172.png"))
    (level / "imgs" / "0" / "sample_172.png").write_bytes(b"")
    task = read(release, tmp_path, difficulty=6)
    assert sum(len(split) for split in task.splits.values()) == N - 1


def test_other_empty_and_cut_images_are_errors(release, tmp_path):
    image = level_of(release) / "imgs" / "0" / "sample_5.png"
    whole = image.read_bytes()
    for content in (b"", whole[: len(whole) // 2]):
        image.write_bytes(content)
        with pytest.raises(ValueError, match=r"sample_5\.png cannot be read"):
            read(release, tmp_path)
    Image.fromarray(np.zeros((16, 32), np.uint8)).save(image)
    with pytest.raises(ValueError, match=r"sample_5\.png .*32.*16.* not a grey image"):
        read(release, tmp_path)
    image.write_bytes(whole)
    assert len(read(release, tmp_path).splits["train"]) == 32  # goes on with what it had


def test_images_have_the_grey_values_that_a_viewer_shows(release, tmp_path):
    image = level_of(release) / "imgs" / "0" / "sample_3.png"
    grey = Image.open(image)
    grey.load()
    for other in (grey.convert("RGB").quantize(256), grey.convert("RGB"), grey):
        other.save(image)
        np.testing.assert_array_equal(
            read(release, tmp_path).splits["train"].tokens[3], np.asarray(grey).ravel()
        )
    grey.convert("I;16").save(image)
    with pytest.raises(ValueError, match=r"sample_3\.png .* not a grey image"):
        read(release, tmp_path)


def test_a_release_is_official_if_it_is_whole(tmp_path, monkeypatch):
    """The counts of a level, one of which has a broken image."""
    monkeypatch.setattr(pathfinder, "SIZES", (16, 2, 2))
    for difficulty, n in ((14, 20), (6, 19)):
        write(tmp_path, spec(32, difficulty), 0, n)
        options = {"cache_dir": tmp_path / "cache", "difficulty": difficulty}
        assert load(32, tmp_path, **options).source == "official"
        assert load(32, tmp_path, **options, limit=2).source == "official, 2 + 2 + 2 examples"


def test_bad_metadata(release, tmp_path):
    file = level_of(release) / "metadata" / "0.npy"
    for text, message in (
        (LINE + LINE.replace(" 0 1 ", " 0 2 "), r"0\.npy"),
        (LINE.replace("imgs/0", "../../etc"), r"0\.npy"),
        (LINE, "has 1 images: too few"),
        ("\xff\xfe", r"0\.npy"),
    ):
        file.write_text(text, "latin-1")
        with pytest.raises(ValueError, match=message):
            read(release, tmp_path)
    with pytest.raises(ValueError, match=r"lra_release\.gz.*task\.generate=true"):
        load(64, release, cache_dir=tmp_path)


def test_generated_splits_do_not_depend_on_each_others_sizes(tmp_path):
    def generated(**options):
        return load(32, "nowhere", cache_dir=tmp_path, seed=4, generate=True, **options)

    small, large = generated(examples=(20, 10, 10)), generated(examples=(80, 20, 10))
    assert (small.source, len(large.splits["train"])) == ("generated v2", 80)
    for name, n in {"train": 20, "val": 10, "test": 10}.items():
        a, b = small.splits[name], large.splits[name]
        np.testing.assert_array_equal(a.tokens[:n], b.tokens[:n])
        np.testing.assert_array_equal(a.labels[:n], b.labels[:n])
    val = make(spec(32), 4, STREAM, 10)
    np.testing.assert_array_equal(small.splits["val"].labels, val.labels)
    hilbert = generated(examples=(20, 10, 10), order="hilbert", limit=5).splits["val"]
    expected = small.splits["val"].tokens[:5][:, pixel_order((32, 32), "hilbert")]
    np.testing.assert_array_equal(hilbert.tokens, expected)
    assert generated(examples=(2, 2, 2), pad_black=True).pad_black and not small.pad_black
    with pytest.raises(ValueError, match="examples="):
        generated(examples=(1, 2))
