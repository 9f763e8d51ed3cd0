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
from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cache, partial
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

Places = dict[str, tuple[Path, list[str]]]  # of each label: its folder, and the files in it
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
    chosen = sorted(sorted(paths, key=lambda name: (-len(paths[name][1]), name))[:most])
    if len(chosen) < 2:
        found = f"one label, {chosen[0]}" if chosen else "no files in subfolders"
        raise ValueError(f"{where}: {found}; give a folder with two subfolders of files or more")
    files, left_out = _read({name: paths[name] for name in chosen}, SPARE * per_label, seed)
    key = {"files": _digest(files), "left_out": left_out, "per_label": per_label, "seed": seed}

    def make() -> task.Arrays:
        return _arrays(files, left_out, per_label, seed, where, versions=folder is None)

    data = task.cached(cache_dir, "files", key, make)
    manifest = json.loads(str(data["manifest"]))
    print(_summary(manifest), file=sys.stderr)
    split = partial(
        task.padded_split, data, most=length, width=task.padded_length(length), limit=limit
    )
    splits = {name: split(name, as_bytes=True) for name in task.SPLITS}
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
        baselines={
            "majority": task.best_constant(train, test),
            "most frequent name": task.best_constant(train, test, names),
        },
        manifest=manifest,
    )


# ---- finding and reading


def _packages() -> Places:
    """Return the Python files of each top-level package of this machine."""
    places = sysconfig.get_paths()
    roots = dict.fromkeys(places[key] for key in ("stdlib", "platstdlib", "purelib", "platlib"))
    found: Places = {}
    for root in map(Path, roots):
        for folder in _folders(root) if root.is_dir() else ():
            if folder.name.isidentifier() and not folder.name.startswith("__"):
                files = _inside(folder, "*.py")
                if len(files) > len(found.get(folder.name, (folder, []))[1]):
                    found[folder.name] = folder, files
    return found


def _subfolders(root: Path) -> Places:
    """Return the files of each subfolder that has any. Raises ValueError if `root` is not a
    folder.
    """
    if not root.is_dir():
        raise ValueError(f"folder={root} is not a folder: it has a subfolder for each label")
    found = {folder.name: (folder, _inside(folder, "*")) for folder in _folders(root)}
    return {name: place for name, place in found.items() if place[1]}


def _folders(root: Path) -> list[Path]:
    return [x for x in sorted(root.iterdir()) if x.is_dir() and not x.name.startswith(".")]


def _inside(folder: Path, pattern: str) -> list[str]:
    paths = (path for path in folder.rglob(pattern) if path.is_file())
    return sorted(path.relative_to(folder).as_posix() for path in paths)


def _read(places: Places, most: int, seed: int) -> tuple[Files, dict[str, dict[str, int]]]:
    """At most `most` files of each label in a random order, and how many are of no use, and why."""
    files: Files = {name: [] for name in places}
    left_out = {name: Counter() for name in places}
    total = sum(min(most, len(some)) for _, some in places.values())
    for name, path in progress(_drawn(places, most, seed), total, "reading files"):
        try:
            with open(places[name][0] / path, "rb") as file:
                text = file.read(LONGEST)
            codecs.getincrementaldecoder("utf-8")().decode(text)
        except OSError:
            left_out[name]["unreadable"] += 1
        except UnicodeDecodeError:
            left_out[name]["undecodable"] += 1
        else:
            if len(text) < SHORT:
                left_out[name]["short"] += 1
            else:
                files[name].append((path, text))
    return files, {name: dict(sorted(found.items())) for name, found in left_out.items()}


def _drawn(places: Places, most: int, seed: int) -> Iterator[tuple[str, str]]:
    for name, (_, some) in places.items():
        order = np.random.default_rng([seed, zlib.crc32(name.encode())]).permutation(len(some))
        for i in order[:most].tolist():
            yield name, some[i]


def _digest(files: Files) -> str:
    """Of the names and the bytes of the files, in order."""
    found = hashlib.sha256()
    for name, some in files.items():
        for path, text in some:
            found.update(f"{name}\0{path}\0{len(text)}\0".encode() + text)
    return found.hexdigest()[:12]


# ---- splits


def _arrays(
    files: Files,
    left_out: Mapping[str, Mapping[str, int]],
    per_label: int,
    seed: int,
    where: str,
    versions: bool,
) -> task.Arrays:
    """Bytes, lengths and labels of each split, and the manifest as JSON."""
    distinct, parts, entries = Distinct(), {name: [] for name in task.SPLITS}, []
    for label, (name, some) in enumerate(progress(files.items(), len(files), "comparing files")):
        kept, copies = [], 0
        for path, text in some:
            if len(kept) == per_label:
                break
            if distinct.add(text):
                kept.append((path, text))
            else:
                copies += 1
        others = {**left_out[name], **({"near-duplicates": copies} if copies else {})}
        if len(kept) < LEAST:
            counts = ", ".join(f"{n} {why}" for why, n in others.items()) or "none left out"
            raise ValueError(
                f"{where}: label {name} has {len(kept)} files of use ({counts}); "
                f"train, val and test need at least {LEAST}"
            )
        held_out = max(1, round(HELD_OUT * len(kept)))
        cuts = {"val": kept[:held_out], "test": kept[held_out : 2 * held_out]}
        cuts["train"] = kept[2 * held_out :]
        for split, chosen in cuts.items():
            parts[split] += [(label, text) for _, text in chosen]
        version = {"version": _version(name)} if versions else {}
        digest = _digest({name: sorted(kept)})
        entries.append({"name": name, **version, "files": len(kept), "digest": digest, **others})
    arrays: task.Arrays = {}
    for i, (split, examples) in enumerate(parts.items()):
        order = np.random.default_rng([seed, i]).permutation(len(examples)).tolist()
        texts = [examples[j][1] for j in order]
        flat = np.frombuffer(b"".join(texts), np.uint8)
        lengths = np.array([len(text) for text in texts], np.int32)
        arrays |= task.named(
            split, flat, lengths, np.array([examples[j][0] for j in order], np.int64)
        )
    whole = hashlib.sha256(json.dumps([entries, seed]).encode()).hexdigest()[:8]
    return arrays | {"manifest": np.array(json.dumps({"digest": whole, "labels": entries}))}


def _version(name: str) -> str:
    """Return the distribution of a package and its version."""
    for distribution in _distributions().get(name, ()):
        return f"{distribution} {metadata.version(distribution)}"
    return f"Python {sys.version.split()[0]}"


@cache
def _distributions() -> Mapping[str, list[str]]:
    return metadata.packages_distributions()


def _summary(manifest: Mapping[str, Any]) -> str:
    """How many files of how many labels there are, and what was left out, in a line."""
    counts = Counter()
    for entry in manifest["labels"]:
        counts += Counter({key: n for key, n in entry.items() if isinstance(n, int)})
    kept = counts.pop("files")
    others = ", ".join(f"{n:,} {why}" for why, n in counts.items())
    text = f"{manifest['digest']}: {kept:,} files of {len(manifest['labels'])} labels"
    return f"{text}; left out: {others}" if others else text


def _most_named(split: task.Split, labels: list[str]) -> np.ndarray:
    """(n,) the label whose name the bytes read have most often; -1 without any."""
    found = np.full(len(split), -1)
    names = [name.lower().encode() for name in labels]
    for i, row in enumerate(split.tokens):
        text = (row[row > 0] - 1).astype(np.uint8).tobytes().lower()
        counts = [text.count(name) for name in names]
        found[i] = int(np.argmax(counts)) if any(counts) else -1
    return found
