"""Files: which package, or which folder, is a whole file from? It is read byte by byte.

By default the files are the Python sources of this machine, of its standard library and installed
packages; the label is the top-level package. `folder` names any folder of labelled text instead,
with a subfolder for each label. Splits are by file, and do not depend on the length that is read.

Near-duplicates are removed before the split, within labels and across them.
"""

import codecs
import hashlib
import json
import sys
import sysconfig
import zlib
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.config import whole_number
from experiments.common.near_duplicates import Distinct
from experiments.common.work import progress
from experiments.lra.tasks import task

SHORTEST, LONGEST = 16, 16_384  # bytes that can be read of a file
PACKAGES = 12  # labels, unless `labels` says otherwise
HELD_OUT = 0.15  # of the files of a label, for val and as many for test
LEAST = 8  # files of a label
SHORT = 128  # bytes; shorter files say too little
SPARE = 2  # files looked at for each that may be kept

Files = dict[str, list[tuple[str, bytes]]]  # of each label: name and first LONGEST bytes


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
    """Return the files task. It needs no `data_dir`.

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
    paths = _packages() if folder is None else _subfolders(Path(folder).expanduser())
    where = "the Python packages of this machine" if folder is None else f"folder={folder}"
    most = PACKAGES if labels is None and folder is None else labels or len(paths)
    chosen = sorted(sorted(paths, key=lambda name: (-len(paths[name]), name))[:most])
    if len(chosen) < 2:
        raise ValueError(f"{where}: give a folder with two subfolders of files or more")
    files = _read({name: paths[name] for name in chosen}, SPARE * per_label, seed)
    key = {"files": _digest(files), "per_label": per_label, "seed": seed}

    def make() -> task.Arrays:
        return _arrays(files, per_label, seed, where, versions=folder is None)

    data = task.cached(cache_dir, "files", key, make)
    manifest = json.loads(str(data["manifest"]))
    splits = task.padded_splits(data, length, limit)
    kind = "Python packages" if folder is None else Path(folder).resolve().name
    counts = " + ".join(f"{len(splits[name]):,}" for name in task.SPLITS)
    train, test = splits["train"], splits["test"]
    names = (_most_named(train, chosen), _most_named(test, chosen))
    return task.Task(
        name="files",
        source=f"{kind} {manifest['digest']}, {len(chosen)} labels, {counts} files",
        classes=len(chosen),
        vocab=task.BYTE_VOCAB,
        splits=splits,
        baselines={"most frequent name": task.best_constant(train, test, names)},
        manifest=manifest,
    )


# ---- finding and reading


def _packages() -> dict[str, list[Path]]:
    """Return the Python files of each top-level package of this machine."""
    places = sysconfig.get_paths()
    roots = dict.fromkeys(places[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    found: dict[str, list[Path]] = {}
    for root in (path for path in map(Path, roots) if path.is_dir()):
        for name, files in _inside(root, "*.py").items():
            if name.isidentifier() and not name.startswith("__"):
                found[name] = max(found.get(name, []), files, key=len)
    return found


def _subfolders(root: Path) -> dict[str, list[Path]]:
    if not root.is_dir():
        raise ValueError(f"folder={root} is not a folder: it has a subfolder for each label")
    return {name: files for name, files in _inside(root, "*").items() if files}


def _inside(root: Path, pattern: str) -> dict[str, list[Path]]:
    """Return the files of each subfolder, in order of their paths."""
    folders = [x for x in sorted(root.iterdir()) if x.is_dir() and not x.name.startswith(".")]
    return {
        x.name: sorted((p for p in x.rglob(pattern) if p.is_file()), key=lambda p: p.as_posix())
        for x in folders
    }


def _read(places: Mapping[str, list[Path]], most: int, seed: int) -> Files:
    """Return at most `most` files of each label in a random order, those that are UTF-8 texts."""
    drawn = []
    for name, some in places.items():
        order = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(len(some))
        drawn += [(name, some[i]) for i in order[:most].tolist()]
    files: Files = {name: [] for name in places}
    for name, path in progress(drawn, len(drawn), "reading files"):
        try:
            with open(path, "rb") as file:
                text = file.read(LONGEST)
            codecs.getincrementaldecoder("utf-8")().decode(text)
        except (OSError, UnicodeDecodeError):
            continue
        if len(text) >= SHORT:
            files[name].append((path.as_posix(), text))
    return files


def _digest(files: Files) -> str:
    """Of the labels and the bytes of the files, in order."""
    found = hashlib.sha256()
    for name, some in files.items():
        for _, text in some:
            found.update(f"{name}\0{len(text)}\0".encode() + text)
    return found.hexdigest()[:12]


# ---- splits


def _arrays(files: Files, per_label: int, seed: int, where: str, versions: bool) -> task.Arrays:
    """Bytes, lengths and labels of each split, and the manifest as JSON."""
    distinct, parts, entries = Distinct(), {name: [] for name in task.SPLITS}, []
    for label, (name, some) in enumerate(progress(files.items(), len(files), "comparing files")):
        kept = []
        for path, text in some:
            if len(kept) < per_label and distinct.add(text):
                kept.append((path, text))
        if len(kept) < LEAST:
            raise ValueError(
                f"{where}: label {name} has {len(kept)} different UTF-8 files of {SHORT} bytes or "
                f"more; train, val and test need at least {LEAST}"
            )
        held_out = max(1, round(HELD_OUT * len(kept)))
        cuts = {"val": kept[:held_out], "test": kept[held_out : 2 * held_out]}
        cuts["train"] = kept[2 * held_out :]
        for split, chosen in cuts.items():
            parts[split] += [(label, text) for _, text in chosen]
        entry = {"name": name, "files": len(kept), "digest": _digest({name: sorted(kept)})}
        entries.append(entry | ({"version": _version(name)} if versions else {}))
    arrays: task.Arrays = {}
    for i, (split, examples) in enumerate(parts.items()):
        order = np.random.default_rng([seed, i]).permutation(len(examples)).tolist()
        texts, labels = [examples[j][1] for j in order], [examples[j][0] for j in order]
        arrays |= task.named(split, texts, labels)
    whole = hashlib.sha256(json.dumps([entries, seed]).encode()).hexdigest()[:8]
    return arrays | {"manifest": np.array(json.dumps({"digest": whole, "labels": entries}))}


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
