"""Files: which package, or which folder, is a whole file from? It is read byte by byte.

By default the files are the Python sources of this machine, of its standard library and installed
packages; the label is the top-level package. `folder` names any folder of labelled text instead,
with a subfolder for each label. Splits are by file, and do not depend on the length that is read.
A file with the words of another one is left out.
"""

import codecs
import hashlib
import re
import sysconfig
import zlib
from collections.abc import Sequence
from pathlib import Path

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
    paths = by_label(folder)
    most = labels or (PACKAGES if folder is None else len(paths))
    chosen = sorted(sorted(paths, key=lambda name: (-len(paths[name]), name))[:most])
    where = "the Python packages of this machine" if folder is None else f"folder={folder}"
    if len(chosen) < 2:
        raise ValueError(f"{where}: give a folder with two subfolders of files or more")
    parts: dict[str, list[tuple[int, bytes]]] = {name: [] for name in task.SPLITS}
    seen, found = set[bytes](), hashlib.sha256(f"{seed}".encode())
    for label, name in enumerate(progress(chosen, len(chosen), "reading files")):
        rng = np.random.default_rng([seed, zlib.crc32(name.encode())])
        order = rng.permutation(len(paths[name]))
        texts = read([paths[name][i] for i in order], per_label, seen)
        if len(texts) < LEAST:
            raise ValueError(
                f"{where}: label {name} has {len(texts)} different UTF-8 files of {SHORT} bytes or "
                f"more; train, val and test need at least {LEAST}"
            )
        for text in (name.encode(), *texts):
            found.update(hashlib.sha256(text).digest())
        held_out = max(1, round(HELD_OUT * len(texts)))
        cuts = {"val": slice(held_out), "test": slice(held_out, 2 * held_out)}
        for split, cut in (cuts | {"train": slice(2 * held_out, None)}).items():
            parts[split] += [(label, text) for text in texts[cut]]
    data: task.Arrays = {}
    for i, (split, examples) in enumerate(parts.items()):
        order = np.random.default_rng([seed, i]).permutation(len(examples))
        numbers, texts = zip(*(examples[j] for j in order), strict=True)
        data |= task.named(split, texts, numbers)
    splits = task.padded_splits(data, length, limit)
    counts = " + ".join(f"{len(splits[name]):,}" for name in task.SPLITS)
    kind = "Python packages" if folder is None else Path(folder).resolve().name
    return task.Task(
        name="files",
        source=f"{kind} {found.hexdigest()[:12]}, {len(chosen)} labels, {counts} files",
        classes=len(chosen),
        vocab=task.BYTE_VOCAB,
        splits=splits,
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
