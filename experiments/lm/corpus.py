"""Texts as documents, from where a user has them: folders, the standard library, packages.

A corpus is a list of documents with its manifest: where they come from, in what version, and the
digest of what was read.
"""

import hashlib
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from experiments.common.work import progress

STDLIB, PACKAGES = "stdlib", "packages"
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SHOWN = 3  # undecodable files that an error names
REMEDY = "give a folder of text files, stdlib, packages, or a folder with train.bin and val.bin"


@dataclass
class Texts:
    """The documents of a corpus, as UTF-8 bytes."""

    name: str
    train: list[bytes]
    manifest: list[dict[str, Any]] = field(default_factory=list)

    @property
    def digest(self) -> str:
        """Twelve hex digits of all documents, in their order."""
        found = hashlib.sha256()
        for text in (*self.train, b"\xff"):
            found.update(len(text).to_bytes(8, "little"))
            found.update(text)
        return found.hexdigest()[:12]


def read_texts(data: str, pattern: str, most: int | None) -> Texts:
    """Return the documents of an option `data=`, each once.

    Args:
        data: stdlib, packages, or a folder of text files.
        pattern: of the names of files in a folder of text.
        most: bytes of documents to keep of all; None: all.

    Raises:
        ValueError: there is nothing to read, or files are not UTF-8; the error names them.
    """
    path = Path(data).expanduser()
    if pattern != "*" and data in (STDLIB, PACKAGES):
        raise ValueError(
            f"pattern={pattern}: is for a folder of text; leave it out for data={data}"
        )
    if data == STDLIB:
        return _stdlib(most)
    if data == PACKAGES:
        return _packages(most)
    if not path.is_dir():
        raise ValueError(f"data={data}: no such folder; {REMEDY}")
    return _folder(path, pattern, most)


# ---- where documents come from


def _folder(path: Path, pattern: str, most: int | None) -> Texts:
    files = sorted(p for p in path.rglob(pattern) if p.is_file() and not _hidden(p, path))
    if not files:
        raise ValueError(f"data={path}: no file there fits pattern={pattern}; {REMEDY}")
    documents, bad = [], []
    for file in progress(files, len(files), f"reading {path}"):
        content = file.read_bytes()
        (documents if _is_text(content) else bad).append((file, content))
    if bad:
        names = ", ".join(str(file.relative_to(path)) for file, _ in bad[:SHOWN])
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise ValueError(
            f"data={path}: not UTF-8 text: {names}{more}; leave them out with pattern='*.txt', "
            "or convert them with iconv"
        )
    texts = _kept((content for _, content in documents), most)
    if not texts:
        raise ValueError(f"data={path}: its files are all empty; {REMEDY}")
    return _texts(path.name, texts, about={"name": path.name})


def _stdlib(most: int | None) -> Texts:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = (p for p in sorted(root.rglob("*.py")) if not SKIPPED & set(p.relative_to(root).parts))
    texts = _kept((c for p in files if _is_text(c := p.read_bytes())), most)
    version = sys.version.split()[0]
    return _texts(STDLIB, texts, about={"name": "python", "version": version})


def _packages(most: int | None) -> Texts:
    """Return the Python files of the installed packages, package by package, and their manifest."""
    found: dict[str, metadata.Distribution] = {}
    for package in metadata.distributions():
        found.setdefault(str(package.metadata["Name"] or "").lower(), package)
    texts, manifest, seen, left = [], [], set(), most
    for name in progress(sorted(found), len(found), "reading packages"):
        package = found[name]
        files = sorted(f for f in package.files or () if f.suffix == ".py")
        contents = (_read(Path(str(f.locate()))) for f in files if not SKIPPED & set(f.parts))
        own = list(_unique(_kept((c for c in contents if c and _is_text(c)), left), seen))
        if own:
            size = sum(map(len, own))
            left = None if left is None else left - size
            about = {"name": name, "version": package.version}
            manifest += _texts(name, own, about).manifest
            texts += own
        if left is not None and left <= 0:
            break
    if not texts:
        raise ValueError("data=packages: no installed package has Python files; give data=stdlib")
    return Texts(PACKAGES, texts, manifest=manifest)


# ---- parts


def _texts(name: str, texts: list[bytes], about: dict[str, Any]) -> Texts:
    """Return a corpus with a manifest of one line."""
    made = Texts(name, list(_unique(texts, set())))
    size = sum(map(len, made.train))
    made.manifest = [about | {"digest": made.digest, "files": len(made.train), "bytes": size}]
    return made


def _kept(texts: Iterable[bytes], most: int | None) -> list[bytes]:
    """Return the texts that are not empty, up to `most` bytes in all; the last one is whole."""
    kept, size = [], 0
    for text in texts:
        if most is not None and size >= most:
            break
        if text:
            kept.append(text)
            size += len(text)
    return kept


def _unique(texts: Iterable[bytes], seen: set[bytes]) -> Iterator[bytes]:
    for text in texts:
        key = hashlib.sha256(text).digest()
        if key not in seen:
            seen.add(key)
            yield text


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # listed by the package, but not there
        return b""


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)
