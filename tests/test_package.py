"""The wheel and the source distribution: their contents, and the wheel outside a clone."""

import importlib
import os
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

from experiments.bench.rows import SpeedRow
from experiments.common.records import read

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("masks", "sparseflash", "experiments")
PARTS = (*PACKAGES, "pyproject.toml", "README.md", "LICENSE", "CITATION.cff")


@pytest.fixture(scope="module")
def packages(tmp_path_factory) -> Path:
    """A folder with both, built from a copy of the files without git."""
    return built(tmp_path_factory.mktemp("built"))


def built(folder: Path) -> Path:
    source = folder / "source"
    source.mkdir()
    for part in PARTS:
        copy = shutil.copytree if (ROOT / part).is_dir() else shutil.copy
        copy(ROOT / part, source / part)  # pyright: ignore
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    return folder


def test_builds_are_the_same_bytes(packages, tmp_path):
    again = built(tmp_path)
    for path in (*packages.glob("*.whl"), *packages.glob("*.tar.gz")):
        assert path.read_bytes() == (again / path.name).read_bytes()


def test_contents(packages):
    (wheel,), (sdist,) = packages.glob("*.whl"), packages.glob("*.tar.gz")
    in_wheel = set(zipfile.ZipFile(wheel).namelist())
    with tarfile.open(sdist) as archive:
        in_sdist = {name.partition("/")[2] for name in archive.getnames()}
    files = {
        path.relative_to(ROOT).as_posix()
        for folder in PACKAGES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".yaml") or path.name == "py.typed"
    }
    metadata = {name for name in in_wheel if ".dist-info/" in name}
    assert in_wheel - metadata == files and files < in_sdist
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    assert {"LICENSE", "README.md", "pyproject.toml"} < in_sdist


@pytest.fixture
def outside(packages, tmp_path):
    """Runs a command of the wheel, unpacked outside a clone, with variables of its own."""
    (wheel,) = packages.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)

    def run(*command: str, **variables: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "0"}
        command = (sys.executable, *command)
        return subprocess.run(
            command, cwd=tmp_path, env=environment | variables, capture_output=True, text=True
        )

    return run


def test_the_doctor_outside_a_clone(outside, tmp_path):
    done = outside("-m", "sparseflash.doctor", "--device", "cpu")
    assert f"installed in {tmp_path}\n" in done.stdout, done.stderr
    assert done.returncode == 0 and done.stdout.endswith("the test passed\n")


def test_an_experiment_outside_a_clone(outside, tmp_path):
    """Its rows name no commit."""
    small = "device=cpu", "providers=[cpu]", "seq_len=128", "heads=1", "head_dim=16"
    done = outside("-m", "experiments.speed", *small, "seconds=0.01", "csv=rows.csv")
    assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "rows.csv", SpeedRow)
    assert rows and all(row.commit == "" and row.source for row in rows)


def test_experiments_say_what_they_need(outside, tmp_path):
    (tmp_path / "hydra.py").write_text("raise ModuleNotFoundError('hydra', name='hydra')")
    done = outside("-c", "from experiments.speed import main")
    assert done.returncode == 1
    assert done.stderr == "error: no module hydra: pip install 'sparseflash[experiments]'\n"


def test_commands_are_there():
    """Every command of pyproject.toml names a function."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for module, name in (entry.split(":") for entry in named.values()):
        assert callable(getattr(importlib.import_module(module), name))
