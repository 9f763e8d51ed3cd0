"""Files: which package, or which folder, is a whole file from? It is read byte by byte.

By default the files are the Python sources of this machine, of its standard library and installed
packages; the label is the top-level package. `folder` names any folder of labelled text instead,
with a subfolder for each label. Splits are by file, and do not depend on the length that is read.
A file with the words of another one is left out.
"""

import codecs
import hashlib
import json
import re
import sys
import sysconfig
import zlib
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.config import whole_number
from experiments.common.work import progress
from experiments.lra.tasks import task

SHORTEST, LONGEST = 16, 16_384  # bytes that can be read of a file
PACKAGES = 12  # labels, unless `labels` says otherwise
HELD_OUT = 0.15  # of the files of a label, for val and as many for test
LEAST = 8  # files of a label
SHORT = 128  # bytes; shorter files say too little


def load(
    data_dir: Path,
    *,
    cache_dir: Path,
    seed: int = 0,
    folder: str | None = None,
    length: int = 1024,
    labels: int | None = None,
    per_label: int = 600,
    limit: int | None = None,
) -> task.Task:
    """Return the files task. It needs no `data_dir`, and caches nothing.

    Args:
        seed: of the files that are drawn, and of the splits.
        folder: of labelled text, a subfolder a label; None: Python packages of this machine.
        length: bytes read of a file, 16 to 16,384; the padded length is the next power of two.
        labels: how many, those with the most files; None: 12 packages, or all subfolders.
        per_label: files of a label at most.
        limit: the first examples of each split only.

    Raises:
        ValueError: an option is wrong, or there are too few labels, or too few files of one.
    """
    whole_number("length", length, SHORTEST)
    if length > LONGEST:
        raise ValueError(f"length={length}: give at most {LONGEST} bytes")
    whole_number("per_label", per_label, LEAST)
    if labels is not None:
        whole_number("labels", labels, 2)
    paths = by_label(folder)
    most = labels or (PACKAGES if folder is None else len(paths))
    chosen = sorted(sorted(paths, key=lambda name: (-len(paths[name]), name))[:most])
    where = "the Python packages of this machine" if folder is None else f"folder={folder}"
    if len(chosen) < 2:
        raise ValueError(f"{where}: give a folder with two subfolders of files or more")
    parts: dict[str, list[tuple[int, bytes]]] = {name: [] for name in task.SPLITS}
    seen, entries = set[bytes](), []
    for label, name in enumerate(progress(chosen, len(chosen), "reading files")):
        order = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(
            len(paths[name])
        )
        texts = read([paths[name][i] for i in order], per_label, seen)
        if len(texts) < LEAST:
            raise ValueError(
                f"{where}: label {name} has {len(texts)} different UTF-8 files of {SHORT} bytes or "
                f"more; train, val and test need at least {LEAST}"
            )
        held_out = max(1, round(HELD_OUT * len(texts)))
        cuts = {"val": slice(held_out), "test": slice(held_out, 2 * held_out)}
        for split, cut in (cuts | {"train": slice(2 * held_out, None)}).items():
            parts[split] += [(label, text) for text in texts[cut]]
        entry = {"name": name, "files": len(texts), "digest": _digest(sorted(texts))}
        entries.append(entry | ({"version": _version(name)} if folder is None else {}))
    data: task.Arrays = {}
    for i, (split, examples) in enumerate(parts.items()):
        order = np.random.default_rng([seed, i]).permutation(len(examples))
        numbers, texts = zip(*(examples[j] for j in order), strict=True)
        data |= task.named(split, texts, numbers)
    splits = task.padded_splits(data, length, limit)
    counts = " + ".join(f"{len(splits[name]):,}" for name in task.SPLITS)
    digest = _digest([json.dumps([entries, seed]).encode()])
    kind = "Python packages" if folder is None else Path(folder).resolve().name
    train, test = splits["train"], splits["test"]
    names = (_most_named(train, chosen), _most_named(test, chosen))
    return task.Task(
        name="files",
        source=f"{kind} {digest}, {len(chosen)} labels, {counts} files",
        classes=len(chosen),
        vocab=task.BYTE_VOCAB,
        splits=splits,
        baselines={"most frequent name": task.best_constant(train, test, names)},
        manifest={"digest": digest, "labels": entries},
    )


def by_label(folder: str | None) -> dict[str, list[Path]]:
    """Return the files of each subfolder, or of each top-level package of this machine, in order
    of their paths. Raises ValueError for no folder.
    """
    if folder is not None:
        root = Path(folder).expanduser()
        if not root.is_dir():
            raise ValueError(f"folder={root} is not a folder: it has a subfolder for each label")
        return {name: files for name, files in _inside(root, "*").items() if files}
    places, found = sysconfig.get_paths(), dict[str, list[Path]]()
    roots = dict.fromkeys(places[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    for root in filter(Path.is_dir, map(Path, roots)):
        for name, files in _inside(root, "*.py").items():
            if name.isidentifier() and not name.startswith("__"):
                found[name] = max(found.get(name, []), files, key=len)
    return found


def _inside(root: Path, pattern: str) -> dict[str, list[Path]]:
    folders = [x for x in sorted(root.iterdir()) if x.is_dir() and not x.name.startswith(".")]
    return {x.name: sorted(p for p in x.rglob(pattern) if p.is_file()) for x in folders}


def read(paths: Sequence[Path], most: int, seen: set[bytes]) -> list[bytes]:
    """Return the first bytes of at most `most` files, UTF-8 texts whose words are not in `seen`,
    the digests of those before.
    """
    found: list[bytes] = []
    for path in paths:
        try:
            with open(path, "rb") as file:
                text = file.read(LONGEST)
            whole = codecs.getincrementaldecoder("utf-8")().decode(text).lower()
        except (OSError, UnicodeDecodeError):
            continue
        words = hashlib.sha256(" ".join(re.findall(r"\w+", whole)).encode()).digest()
        if len(text) >= SHORT and words not in seen:
            seen.add(words)
            found.append(text)
        if len(found) == most:
            break
    return found


def _digest(texts: Sequence[bytes]) -> str:
    found = hashlib.sha256()
    for text in texts:
        found.update(f"{len(text)} ".encode() + text)
    return found.hexdigest()[:12]


def _version(name: str) -> str:
    """Return the distribution of a package and its version."""
    for distribution in metadata.packages_distributions().get(name, ()):
        return f"{distribution} {metadata.version(distribution)}"
    return f"Python {sys.version.split()[0]}"


def _most_named(split: task.Split, labels: list[str]) -> np.ndarray:
    """(n,) the label whose name the bytes read have most often; -1 without any."""
    found = np.full(len(split), -1)
    names = [name.lower().encode() for name in labels]
    for i, row in enumerate(split.tokens):
        text = (row[row > 0] - 1).astype(np.uint8).tobytes().lower()
        counts: list[Any] = [text.count(name) for name in names]
        found[i] = int(np.argmax(counts)) if any(counts) else -1
    return found
