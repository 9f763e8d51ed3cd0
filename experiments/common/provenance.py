"""Where a measurement comes from: versions, source digest, commit.

The source digest is computed from git's own hashes of files. It is therefore cheap for any commit
of the history, and a row can be traced to the commit whose files it was measured with.
"""

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

from experiments.common.devices import device_name
from masks.registry import import_own, own_modules

ROOT = Path(__file__).resolve().parents[2]
CODE = ("masks", "sparseflash", "experiments")  # changes elsewhere change no measurement
CHANGES = "+changes"
UNTRACED = "untraced"  # the commit of rows that no commit of the history can reproduce
COMMIT = "SOURCE_COMMIT"  # environment variable: the commit of a copy without git


def origin(device: str, command: str, folders: tuple[str, ...]) -> dict[str, Any]:
    """The fields of a row that say where it comes from; `source` is the digest of `folders`."""
    about = {"date": now(), "command": command}
    return {"device": device_name(device), **code_version(folders), **about}


def code_version(folders: tuple[str, ...] = ("masks", "sparseflash")) -> dict[str, Any]:
    """The versions of torch and triton, the source digest of `folders`, and the commit."""
    return versions() | {"source": source_digest(*folders), "commit": commit()}


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


@cache
def versions() -> dict[str, str]:
    """The versions of torch and triton."""
    return {"torch": torch.__version__, "triton": version("triton")}


@cache
def version(package: str) -> str:
    """The version of a package; empty where it is not installed."""
    try:
        return metadata.version(package) if package else ""
    except metadata.PackageNotFoundError:
        return ""


@cache
def source_digest(*folders: str) -> str:
    """Twelve hex digits of the Python files of these folders as they are now.

    Modules with patterns of the user's own count too. No commit has them. Raises ValueError if one
    cannot be imported.
    """
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    blobs = {path.relative_to(ROOT).as_posix(): _blob(path) for path in paths}
    import_own()
    for name in own_modules():
        file = getattr(sys.modules[name], "__file__", None)  # a built-in module has none
        if file is not None:
            blobs[name] = _blob(Path(file))
    return _digest(blobs)


@cache
def digest_at(commit: str, *folders: str) -> str:
    """`source_digest` at a commit of the history. Raises ValueError if git does not have it."""
    blobs = {}
    for line in git("ls-tree", "-r", commit, "--", *folders).splitlines():
        about, path = line.split("\t")
        if path.endswith(".py"):
            blobs[path] = about.split()[2]
    return _digest(blobs)


def trace(source: str, folders: tuple[str, ...], named: str = "") -> str | None:
    """A commit with this source digest: the one named if it has it, else the newest, or None."""
    candidates = [named] if named and not named.endswith(CHANGES) else []
    for candidate in [*candidates, *_history(folders)]:
        try:
            if digest_at(candidate, *folders) == source:
                return candidate
        except ValueError:  # the named commit is unknown here
            continue
    return None


@cache
def commit() -> str:
    """The commit that is checked out, with +changes where code differs from it.

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
    """Raises ValueError for a file under docs if what is measured now would have no commit."""
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
    """What a git command prints. Raises ValueError if it fails or there is no git."""
    try:
        done = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ValueError(f"git {' '.join(words)} failed: {error}") from None
    return done.stdout


@cache
def _history(folders: tuple[str, ...]) -> list[str]:
    """The commits that changed these folders, newest first."""
    return git("log", "--format=%H", "--", *folders).split()


def _digest(blobs: dict[str, str]) -> str:
    lines = "".join(f"{blob} {path}\n" for path, blob in sorted(blobs.items()))
    return hashlib.sha256(lines.encode()).hexdigest()[:12]


def _blob(path: Path) -> str:
    """The hash that git gives a file's content."""
    data = path.read_bytes()
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()
