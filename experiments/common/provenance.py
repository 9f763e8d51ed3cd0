"""Where a measurement comes from: versions, source digest, commit."""

import hashlib
import os
import subprocess
import sys
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from masks.registry import import_own, own_modules

ROOT = Path(__file__).resolve().parents[2]
CODE = ("masks", "sparseflash", "experiments")  # changes elsewhere change no measurement
CHANGES = "+changes"
COMMIT = "SOURCE_COMMIT"  # environment variable: the commit of a copy without git


def code_version(folders: tuple[str, ...]) -> dict[str, Any]:
    """Return the versions of torch and triton, the source digest of `folders`, and the commit."""
    return versions() | {"source": source_digest(*folders), "commit": commit()}


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def versions() -> dict[str, str]:
    """Return the versions of torch and triton."""
    return {"torch": torch.__version__, "triton": version("triton")}


@cache
def version(package: str) -> str:
    """Return the version of a package; empty where it is not installed."""
    try:
        return metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:
        return ""


@cache
def source_digest(*folders: str) -> str:
    """Return twelve hex digits of the Python files of these folders as they are now, and of the
    modules with patterns of the user's own. Raises ValueError if one cannot be imported.
    """
    files = {p.relative_to(ROOT).as_posix(): p for f in folders for p in (ROOT / f).rglob("*.py")}
    import_own()
    for name in own_modules():
        file = getattr(sys.modules[name], "__file__", None)  # a built-in module has none
        files |= {} if file is None else {name: Path(file)}
    digest = hashlib.sha256()
    for name, path in sorted(files.items()):
        digest.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return digest.hexdigest()[:12]


@cache
def commit() -> str:
    """Return the commit that is checked out, with +changes where code differs from it.

    Empty outside a clone, unless SOURCE_COMMIT names it.
    """
    try:
        top, head = git("rev-parse", "--show-toplevel", "--short=12", "HEAD").split("\n")[:2]
        if Path(top) != ROOT:  # installed in the checkout of another project
            return os.environ.get(COMMIT, "")
        return head + (CHANGES if git("status", "--porcelain", "--", *CODE) else "")
    except ValueError:
        return os.environ.get(COMMIT, "")


def check_published(path: Path) -> None:
    """Raise ValueError for a file under docs if what is measured now would have no commit."""
    if ROOT / "docs" not in path.resolve().parents:
        return
    if not commit():
        raise ValueError(
            f"{path} holds published rows, which name a commit, and this is not a git checkout: "
            f"give the commit of these files as {COMMIT}=... in the environment"
        )
    if commit().endswith(CHANGES):
        raise ValueError(
            f"{path} holds published rows, which come from a commit, and the code has changed "
            "since: commit first, or allow it with allow_changes=true"
        )


def git(*words: str) -> str:
    """Return what a git command prints. Raise ValueError if it fails or there is no git."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"git {' '.join(words)} failed: {error}") from None
    return done.stdout
