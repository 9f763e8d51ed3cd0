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

from experiments.common.rows import read

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
        if not path.is_relative_to(ROOT / "experiments" / "tools")  # for maintainers
        if path.suffix in (".py", ".yaml") or path.name == "py.typed"
    }
    metadata = {name for name in in_wheel if ".dist-info/" in name}
    assert in_wheel - metadata == files and files < in_sdist
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    assert {"LICENSE", "README.md", "pyproject.toml"} < in_sdist


OUTSIDE = """
import runpy, sys

def run(module, *words):
    sys.argv = [module, *words]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        status = 0
    except SystemExit as stop:
        status = stop.code
    print(f"exit status: {status}", end="====")

sys.modules["hydra"] = None  # not installed
run("experiments.speed")
del sys.modules["hydra"]
run("sparseflash.doctor", "--device", "cpu")
small = "device=cpu", "providers=[cpu]", "seq_len=128", "heads=1", "head_dim=16"
run("experiments.speed", *small, "seconds=0.01", "rows=rows.jsonl")
"""


@pytest.fixture(scope="module")
def outside(packages, tmp_path_factory) -> tuple[Path, list[str]]:
    """The wheel, unpacked outside a clone, and what three of its programs print, of one process."""
    (wheel,) = packages.glob("*.whl")
    folder = tmp_path_factory.mktemp("outside")
    zipfile.ZipFile(wheel).extractall(folder)
    environment = os.environ | {"PYTHONPATH": str(folder), "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-c", OUTSIDE]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder, done.stdout.split("====")


def test_experiments_say_what_they_need(outside):
    wanted = "error: no module hydra: pip install 'sparseflash[experiments]'"
    assert outside[1][0] == f"exit status: {wanted}"


def test_the_doctor_outside_a_clone(outside):
    folder, (_, said, *_) = outside
    assert f"installed in {folder}\n" in said
    assert said.endswith("the test passed\nexit status: 0")


def test_an_experiment_outside_a_clone(outside):
    """Its rows name no commit."""
    folder, (*_, said, _) = outside
    assert said.endswith("exit status: 0"), said
    rows = read(folder / "rows.jsonl")
    assert rows and all(row["commit"] == "" and row["source"] for row in rows)


def test_commands_are_there():
    """Every command of pyproject.toml names a function."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    for module, name in (entry.split(":") for entry in named.values()):
        assert callable(getattr(importlib.import_module(module), name))
