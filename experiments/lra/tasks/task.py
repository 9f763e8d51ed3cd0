"""A task of the Long Range Arena, how one is loaded, and functions that the tasks share."""

import inspect
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

import masks
from experiments.common.config import whole_number
from experiments.common.files import digest, read_arrays, write_whole

SPLITS = ("train", "val", "test")
RELEASE = "the LRA release (lra_release.gz of google-research/long-range-arena)"
AGAIN = "unpack the LRA release again"
BYTE_VOCAB = 257  # of texts: 0 pads, byte b is b + 1
PATHFINDER = {f"pathfinder{size}": size for size in (32, 64, 128, 256)}


@dataclass(frozen=True)
class Split:
    """Examples as padded token ids."""

    tokens: np.ndarray  # uint8 or int16 (n, length); pairs: (n, 2, length). 0 pads after `lengths`
    labels: np.ndarray  # int64 (n,)
    lengths: np.ndarray | None = None  # int32 (n,) or (n, 2), >= 1; None: every token counts

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def arrays(self) -> tuple[np.ndarray | None, ...]:
        """A batch of all examples."""
        return self.tokens, self.lengths, self.labels

    def first(self, n: int | None) -> "Split":
        """Return the first `n` examples, as views; None: all of them."""
        return self if n is None or n >= len(self) else self.take(slice(n))

    def take(self, rows: slice | np.ndarray) -> "Split":
        lengths = None if self.lengths is None else self.lengths[rows]
        return Split(self.tokens[rows], self.labels[rows], lengths)


@dataclass(frozen=True)
class Task:
    name: str
    source: str  # of the data, for tables: "official", "generated", "IMDB same movie" ...
    classes: int
    vocab: int  # rows of the embedding table
    splits: dict[str, Split]  # of SPLITS
    grid: tuple[int, int] | None = None  # (rows, columns) of images
    pad_black: bool = False  # pixels of value 0 are padding
    # test accuracy of shortcuts that ignore the sequence; that of the majority class is added
    baselines: dict[str, float] = field(default_factory=dict)

    @property
    def length(self) -> int:
        """Tokens of an example as padded."""
        return self.splits["train"].tokens.shape[-1]

    @property
    def pair(self) -> bool:
        return self.splits["train"].tokens.ndim == 3

    def __post_init__(self) -> None:
        if missing := [name for name in SPLITS if name not in self.splits]:
            raise ValueError(
                f"{self.name}: no split {', '.join(missing)}: give train, val and test"
            )
        for name in SPLITS:
            self._check(name, self.splits[name])
        majority = best_constant(self.splits["train"], self.splits["test"])
        object.__setattr__(self, "baselines", {"majority": majority} | self.baselines)

    def _check(self, name: str, split: Split) -> None:
        """Raise ValueError if a split does not fit the task."""
        n = len(split)
        shape = (n, 2, self.length) if self.pair else (n, self.length)
        if not n:
            raise ValueError(f"{self.name}: the {name} split is empty")
        checks: Any = [
            ("tokens", split.tokens, 0, self.vocab - 1, shape, (np.uint8, np.int16)),
            ("labels", split.labels, 0, self.classes - 1, (n,), (np.int64,)),
            ("lengths", split.lengths, 1, self.length, shape[:-1], (np.int32, np.int64)),
        ]
        for what, values, least, most, shape, kinds in checks[: 2 if split.lengths is None else 3]:
            if values.shape != shape or values.dtype not in kinds:
                raise ValueError(
                    f"{self.name}: {name} {what} are {values.dtype} {values.shape}, not"
                    f" {' or '.join(kind.__name__ for kind in kinds)} {shape}"
                )
            if values.min() < least or values.max() > most:
                raise ValueError(
                    f"{self.name}: {name} {what} reach from {values.min()} to {values.max()}, "
                    f"not within {least} to {most}"
                )


# ---- loading

# Built-in tasks as MODULE.FUNCTION of this folder, which is imported when the task is loaded: each
# needs packages that the others do not. `task` adds functions.
TASKS: dict[str, str | Callable[..., Task]] = {
    **dict.fromkeys(PATHFINDER, "pathfinder.load"),
    **{name: f"{name}.load" for name in ("listops", "image", "files")},
    "text": "texts.load_text",
    "imdb_same_movie": "texts.load_same_movie",
    "retrieval": "texts.load_retrieval",
}
Load = TypeVar("Load", bound=Callable[..., Task])


def task(name: str) -> Callable[[Load], Load]:
    """Decorate the function that loads a task of your own, which task/NAME.yaml names.

    Its first argument is `data_dir`; the others are keywords: `cache_dir`, `seed` and the options
    of the task.
    """

    def add(load: Load) -> Load:
        TASKS[name] = load
        return load

    return add


def load_task(
    name: str, data_dir: str | Path, *, cache_dir: str | Path, seed: int = 0, **options: Any
) -> Task:
    """Return a task: read from its official files below `data_dir`, or generated.

    Args:
        data_dir: the folder of the official folders (listops-1000, aclImdb, tsv_data, pathfinder32,
            cifar-10-batches-py or cifar10_gray.npz[.xz], ...). It may be or hold lra_release.
        cache_dir: where tokenised and generated data are kept.
        seed: of generated data, and of splits that are drawn.
        options: of the task; None keeps the default. `limit`: the first n examples of every split.
            `generate` (ListOps, Pathfinder): make `examples` (train, val, test). `max_length`,
            `order`, ... : see `load` of the task.

    Raises:
        ValueError: there is no such task or option, or data are missing or broken. The error names
            the file, the place in it and the remedy.
    """
    load = loader(name)
    options = {key: value for key, value in options.items() if value is not None}
    parameters = inspect.signature(load).parameters.values()
    known = {p.name for p in parameters if p.kind is p.KEYWORD_ONLY} - {"cache_dir", "seed"}
    if unknown := sorted(options.keys() - known):
        raise ValueError(
            f"{name} has no option {', '.join(unknown)}: choose from {', '.join(sorted(known))}"
        )
    whole_number("limit", options.get("limit", 1))
    made = load(Path(data_dir).expanduser(), cache_dir=Path(cache_dir), seed=seed, **options)
    if not isinstance(made, Task):
        raise ValueError(f"task={name}: its function returns a {type(made).__name__}: give a Task")
    return made


def loader(name: str) -> Callable[..., Task]:
    """Return the function `load` of a task."""
    if name not in TASKS:
        raise ValueError(f"no task {name!r}: choose from {', '.join(sorted(TASKS))}")
    found = TASKS[name]
    if not isinstance(found, str):
        return found
    module, _, function = found.partition(".")
    load = getattr(import_module(f"experiments.lra.tasks.{module}"), function)
    return partial(load, PATHFINDER[name]) if name in PATHFINDER else load


# ---- what the tasks share


def find(data_dir: Path, name: str) -> Path | None:
    """Return the file or folder `name` of `data_dir` or of lra_release in it, or None.

    The official archive has some folders twice, in lra_release and lra_release/lra_release. The
    inner ones are the ones in use.
    """
    inner = data_dir / "lra_release"
    places = [data_dir, inner / "lra_release", inner]
    if data_dir.name == "lra_release":
        places = [inner / "lra_release", inner, data_dir]
    return next((place / name for place in places if (place / name).exists()), None)


def require(data_dir: Path, names: str | Sequence[str], *, fetch: str, stand_in: str = "") -> Path:
    """Return the first of the files or folders `names` that `find` knows.

    Raises ValueError if there is none, which says what to fetch, where to put it, and what to use
    instead.
    """
    names = [names] if isinstance(names, str) else names
    if found := next((path for name in names if (path := find(data_dir, name))), None):
        return found
    where = f"{data_dir}" if data_dir.is_dir() else f"{data_dir}, which is not a folder"
    remedy = f"fetch {fetch} and put it there as {names[0]}"
    remedy += f", or use {stand_in}" if stand_in else ""
    raise ValueError(f"no {names[0]} in {where}: {remedy}")


def release_files(
    data_dir: Path, folder: str, names: Mapping[str, str], stand_in: str
) -> dict[str, Path]:
    """Return the files of a folder of the LRA release by split; ValueError if one is missing."""
    root = require(data_dir, folder, fetch=RELEASE, stand_in=stand_in)
    paths = {split: root / name for split, name in names.items()}
    for path in paths.values():
        if not path.is_file():
            raise ValueError(f"no {path.name} in {root}: {AGAIN}")
    return paths


def split_sizes(examples: Iterable[int]) -> tuple[int, int, int]:
    """Return (train, val, test) of the `examples` option."""
    sizes = tuple(examples)
    if len(sizes) != 3:
        raise ValueError(f"examples={examples!r}: give three sizes, [train, val, test]")
    for size in sizes:
        whole_number("examples", size)
    return sizes


def source(name: str, splits: Mapping[str, Split], sizes: tuple[int, int, int]) -> str:
    """Return `name`, with the numbers of examples if they are not those of the full data set."""
    found = tuple(len(splits[split]) for split in SPLITS)
    if found == sizes:
        return name
    return f"{name}, {found[0]:,} + {found[1]:,} + {found[2]:,} examples"


def padded_length(max_length: int) -> int:
    """Return the smallest power of two that is at least `max_length`."""
    whole_number("max_length", max_length)
    return 1 << (max_length - 1).bit_length()


def pixel_order(grid: tuple[int, int], order: str) -> np.ndarray:
    """Return int64 (rows * columns,): the pixel, in raster order, at every place of the sequence.

    Args:
        order: "row", or a reordering of `masks`: "hilbert", "morton", "tiles:8" or "tiles:8x16".
    """
    n = grid[0] * grid[1]
    kind, _, tile = str(order).partition(":")  # Hydra reads order=8 as a number
    match kind:
        case "row" if not tile:
            return np.arange(n)
        case "hilbert" if not tile:
            return masks.hilbert(grid).order(n)
        case "morton" if not tile:
            return masks.morton(grid).order(n)
        case "tiles" if re.fullmatch(r"\d+(x\d+)?", tile):
            sides = tile.split("x")
            return masks.tiled(grid, (int(sides[0]), int(sides[-1]))).order(n)
    raise ValueError(
        f"order={order!r}: choose from row, hilbert, morton, tiles:SIZE, tiles:ROWSxCOLUMNS"
    )


def best_constant(
    train: Split, test: Split, keys: tuple[np.ndarray, np.ndarray] | None = None
) -> float:
    """Return the test accuracy of the most frequent label of train, among examples of the same key.

    Args:
        keys: what a shortcut sees, (n,) of train and of test. None: nothing (the majority class).
    """
    seen, asked = keys or (np.zeros(len(train), np.int64), np.zeros(len(test), np.int64))
    guess = np.full(len(test), _most_frequent(train.labels))
    for value in np.unique(seen):
        guess[asked == value] = _most_frequent(train.labels[seen == value])
    return float((guess == test.labels).mean())


def _most_frequent(labels: np.ndarray) -> int:
    return int(np.bincount(labels).argmax())


# ---- arrays kept on disk between runs

Arrays = dict[str, np.ndarray]
FORMAT = 2  # of the arrays of all tasks


def cached(
    cache_dir: Path, name: str, key: Mapping[str, Any], make: Callable[[], Arrays]
) -> Arrays:
    """Return the arrays of `make`, from cache_dir/NAME-DIGEST.npz if made for `key` before."""
    path = cache_dir / f"{name}-{digest({'format': FORMAT, **key})}.npz"
    if path.exists():
        return read_arrays(path, "delete it")
    arrays = make()
    write_whole(path, lambda file: np.savez(file, **arrays), "cache_dir")  # type: ignore[arg-type]
    return arrays


def cached_files(
    cache_dir: Path,
    name: str,
    paths: Mapping[str, Path],
    read: Callable[[Path], tuple[list[bytes], list[int]]],
    **key: Any,
) -> Arrays:
    """Return the texts and labels that `read` finds in each file, cached, as `named` gives them.

    key: what it depends on besides the files.
    """

    def make() -> Arrays:
        return {k: x for split, path in paths.items() for k, x in named(split, *read(path)).items()}

    return cached(cache_dir, name, key | {"files": fingerprint(paths.values())}, make)


def named(split: str, texts: Sequence[bytes], labels: Any) -> Arrays:
    """Return the arrays SPLIT, with all texts end to end, SPLIT_lengths and SPLIT_labels."""
    return {
        split: np.frombuffer(b"".join(texts), np.uint8),
        f"{split}_lengths": np.array([len(text) for text in texts], np.int32),
        f"{split}_labels": np.array(labels, np.int64),
    }


def fingerprint(paths: Iterable[Path]) -> str:
    """Return a digest of the names, sizes and times of files, for the key of a cache."""
    stats = ((path, path.stat()) for path in sorted(paths))
    return digest({str(path): [s.st_size, s.st_mtime_ns] for path, s in stats})


def pad(
    flat: np.ndarray, lengths: np.ndarray, most: int, width: int, *, as_bytes: bool = True
) -> np.ndarray:
    """Return sequences that lie end to end as rows (n, width), cut to `most` and padded with 0.

    Args:
        as_bytes: byte b becomes b + 1. The result is uint8 unless there is a byte 255, which UTF-8
            does not have.
    """
    wide = as_bytes and len(flat) > 0 and flat.max() == 255
    out = np.zeros((len(lengths), width), np.int16 if wide else flat.dtype)
    ends = np.cumsum(lengths, dtype=np.int64)
    for row, end, length in zip(out, ends.tolist(), lengths.tolist(), strict=True):
        keep = min(length, most)
        row[:keep] = flat[end - length : end - length + keep]
        if as_bytes:
            row[:keep] += 1
    return out


def padded_splits(
    data: Arrays,
    most: int,
    limit: int | None,
    names: Sequence[str] = SPLITS,
    *,
    as_bytes: bool = True,
) -> dict[str, Split]:
    """Return the first `limit` examples of splits that `named` made, as `pad` makes them."""
    width, splits = padded_length(most), {}
    for name in names:
        lengths = data[f"{name}_lengths"][:limit]
        tokens = pad(data[name], lengths, most, width, as_bytes=as_bytes)
        splits[name] = Split(tokens, data[f"{name}_labels"][:limit], np.minimum(lengths, most))
    return splits
