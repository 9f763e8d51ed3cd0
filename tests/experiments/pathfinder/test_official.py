"""The writer of folders in the format of the release, statistics, and the program."""

import numpy as np
import pytest
from PIL import Image

from experiments.pathfinder import official
from experiments.pathfinder.generate import Images, make
from experiments.pathfinder.look import measure
from experiments.pathfinder.official import write
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.render import DISTRACTORS, INFO, LABEL, MARGIN, RESTARTS


def test_writing_continues_and_never_mixes(tmp_path, monkeypatch):
    level = write(tmp_path, spec(32), 0, 1030)
    assert len(list((level / "imgs" / "1").iterdir())) == 30
    images = make(spec(32), 0, 0, 1030)
    lines = [line.split() for k in (0, 1) for line in (level / f"metadata/{k}.npy").open()]
    assert [int(line[2]) for line in lines] == [*range(1000), *range(30)]  # in their folder
    assert [int(line[3]) for line in lines] == images.labels.tolist()
    for line, pixels in zip(lines, images.pixels, strict=True):
        assert (np.asarray(Image.open(level / line[0] / line[1])) == pixels).all()
    first = level / "metadata" / "0.npy"
    times = first.stat().st_mtime_ns
    (level / "metadata" / "1.npy").unlink()
    write(tmp_path, spec(32), 0, 1030)
    assert first.stat().st_mtime_ns == times and (level / "metadata" / "1.npy").exists()
    write(tmp_path, spec(32), 0, 1033)  # more than before
    assert len(list((level / "imgs" / "1").iterdir())) == 33
    assert len((level / "metadata" / "1.npy").read_text().splitlines()) == 33
    write(tmp_path, spec(32), 0, 1030)  # keeps what there is
    assert len((level / "metadata" / "1.npy").read_text().splitlines()) == 33
    for other, seed in ((spec(32), 1), (spec(32, distractors=1), 0)):
        with pytest.raises(ValueError, match="other settings"):
            write(tmp_path, other, seed, 1033)
    monkeypatch.setattr(official, "VERSION", 1)
    with pytest.raises(ValueError, match="other settings"):
        write(tmp_path, spec(32), 0, 1033)
    (level / "generated.json").unlink()
    with pytest.raises(ValueError, match="other files"):
        write(tmp_path, spec(32), 0, 1030)


def test_a_line_has_the_margin_of_its_image(tmp_path):
    level, info = write(tmp_path, spec(128), 0, 8), make(spec(128), 0, 0, 8).info
    margins = [int(line.split()[9]) for line in (level / "metadata/0.npy").open()]
    assert margins == [2 + which for which in info[:, MARGIN]] and len(set(margins)) == 2


def test_statistics_have_means_shares_and_standard_errors():
    pixels = np.zeros((4, 2, 2), np.uint8)
    pixels[0], pixels[1, 0] = 8, 4  # means of 8, 2, 0 and 0
    info = np.zeros((4, INFO), np.int64)
    info[:, LABEL], info[:, DISTRACTORS], info[:, RESTARTS] = (1, 0, 0, 0), (1, 2, 3, 4), 7
    found = measure(Images(pixels, info, np.zeros((4, 1, 4), np.int64), np.zeros(4, np.int64)))
    expected = {"images": 4, "mean": 2.5, "non-zero": 1.5, "positive": 0.25, "distractors": 2.5}
    expected |= {"restarts": 7, "std": ((4 * 64 + 2 * 16) / 16 - 2.5**2) ** 0.5}
    expected["mean error"] = (68 / 4 - 2.5**2) ** 0.5 / 2
    expected["non-zero error"] = (20 / 4 - 1.5**2) ** 0.5 / 2
    assert found == pytest.approx(expected)


def test_command(tmp_path, run_program):
    words = f"size=[32,256] examples=20 statistics=true pictures={tmp_path}"
    status, printed, _ = run_program("pathfinder.__main__", *words.split())
    assert status == 0
    assert "curv_contour_length_14  generated" in printed and "official" in printed
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pathfinder-32.png", "pathfinder-256.png"}
