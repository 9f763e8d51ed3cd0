"""The wheel and the source distribution: their contents, and the wheel outside a clone."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("masks", "sparseflash", "pyproject.toml", "README.md", "LICENSE", "CITATION.cff")


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
        for folder in ("masks", "sparseflash")
        for path in (ROOT / folder).rglob("*")
        if path.suffix == ".py" or path.name == "py.typed"
    }
    metadata = {name for name in in_wheel if ".dist-info/" in name}
    assert in_wheel - metadata == files and files < in_sdist
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    assert {"LICENSE", "README.md", "pyproject.toml"} < in_sdist


def test_the_wheel_works_outside_a_clone(packages, tmp_path):
    (wheel,) = packages.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    command = [sys.executable, "-m", "sparseflash.doctor", "--device", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert f"installed in {tmp_path}\n" in done.stdout, done.stderr
    assert done.returncode == 0 and done.stdout.endswith("the test passed\n")
