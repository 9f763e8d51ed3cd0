"""The writer of folders in the format of the release, and the program."""

import subprocess
import sys
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from experiments.pathfinder.__main__ import main
from experiments.pathfinder.official import write
from experiments.pathfinder.parameters import spec

ROOT = Path(__file__).parents[3]


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


def test_command(tmp_path, capsys):
    config = OmegaConf.load(ROOT / "experiments" / "conf" / "pathfinder.yaml")
    config.merge_with({"size": [32, 256], "examples": 20, "statistics": True})
    config.merge_with({"pictures": str(tmp_path / "pictures")})
    main(config)  # type: ignore[arg-type]
    printed = capsys.readouterr().out
    assert "curv_contour_length_14  generated" in printed and "official" in printed
    assert {path.name for path in (tmp_path / "pictures").iterdir()} == {
        "pathfinder-32.png",
        "pathfinder-256.png",
    }
    config.merge_with({"statistics": False, "pictures": None})
    with pytest.raises(ValueError, match="nothing to do"):
        main(config)  # type: ignore[arg-type]


def test_the_command_line_reports_errors_without_a_traceback():
    command = [sys.executable, "-m", "experiments.pathfinder", "size=33", "statistics=true"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    assert done.stderr.startswith("error: Pathfinder of size 33") and "Traceback" not in done.stderr
