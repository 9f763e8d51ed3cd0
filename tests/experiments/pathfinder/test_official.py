"""The writer of folders in the format of the release, and the program."""

import pytest

from experiments.pathfinder.official import write
from experiments.pathfinder.parameters import spec


def test_writing_continues_and_never_mixes(tmp_path):
    level = write(tmp_path, spec(32), 0, 1030)
    assert len(list((level / "imgs" / "1").iterdir())) == 30
    first = level / "metadata" / "0.npy"
    times = first.stat().st_mtime_ns
    (level / "metadata" / "1.npy").unlink()
    write(tmp_path, spec(32), 0, 1030)
    assert first.stat().st_mtime_ns == times and (level / "metadata" / "1.npy").exists()
    with pytest.raises(ValueError, match="other settings"):
        write(tmp_path, spec(32), 1, 1030)
    (level / "generated.json").unlink()
    with pytest.raises(ValueError, match="other files"):
        write(tmp_path, spec(32), 0, 1030)


def test_command(tmp_path, run_program):
    words = f"size=[32,256] examples=20 statistics=true pictures={tmp_path}"
    status, printed, _ = run_program("pathfinder.__main__", *words.split())
    assert status == 0
    assert "curv_contour_length_14  generated" in printed and "official" in printed
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"pathfinder-32.png", "pathfinder-256.png"}
