"""Text as token ids: documents of folders, of Python's library or of packages, and tokenizers.

Ids are bytes, byte-pair encoding trained on the text, or those of nanoGPT's files.
"""

import hashlib
import importlib
import sys
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.files import digest, reading, write_whole
from experiments.common.work import progress
from experiments.lra.tasks.task import cached

STDLIB, PACKAGES = "stdlib", "packages"
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
SHOWN = 3  # undecodable files that an error names
REMEDY = "give a folder of text files, stdlib, packages, or a folder with train.bin and val.bin"

BYTES, BPE = "bytes", "bpe"
END = "<|endoftext|>"
BYTE_END = 256  # the id that ends a document of bytes
SMALLEST = 300  # of a BPE vocabulary: the bytes, the end, and some merges
MOST = 2**16  # ids that uint16 holds
GPT2_END = 50_256
VAL_SHARE = 0.05  # of the bytes of a corpus without a validation part of its own
BINS = ("train.bin", "val.bin")


@dataclass(frozen=True)
class Corpus:
    """Token ids (uint16) for training and validation. Every document ends with `end`."""

    name: str
    tokenizer: str
    digest: str
    train: np.ndarray
    val: np.ndarray
    vocab: int
    end: int
    bytes_per_token: float | None  # of the validation part; None where texts are not at hand
    manifest: list[dict[str, Any]] = field(default_factory=list)  # what was read, in what version


def load_corpus(data: str, tokenizer: str, cache_dir: str, *, pattern: str = "*") -> Corpus:
    """Return the token ids of an option `data=`.

    Args:
        tokenizer: bytes, or bpe:VOCABULARY. nanoGPT's files have their own.
        pattern: of the names of files in a folder of text.

    Raises:
        ValueError: the data or the tokenizer cannot be used; the error says why.
    """
    kind, size = _kind(tokenizer)
    folder = Path(data).expanduser()
    if any((folder / name).exists() for name in BINS):
        return _bins(folder)
    name, texts, manifest = read_texts(data, pattern)
    train, val = split(texts)
    cache, key = Path(cache_dir), _key(digest_of(texts), tokenizer)
    if kind == BYTES:
        arrays = {"train": _as_bytes(train), "val": _as_bytes(val)}
        vocab, end = BYTE_END + 1, BYTE_END
    else:
        encoder = _bpe(train, size, _bpe_file(cache, key))
        vocab, end = encoder.get_vocab_size(), encoder.token_to_id(END)

        def make() -> dict[str, np.ndarray]:
            return {"train": _encode(encoder, train, end), "val": _encode(encoder, val, end)}

        arrays = cached(cache, "lm", key, make)
    ratio = sum(map(len, val)) / max(1, len(arrays["val"]))
    return Corpus(
        name, tokenizer, digest_of(texts), **arrays, vocab=vocab, end=end, bytes_per_token=ratio,
        manifest=manifest,
    )  # fmt: skip


def refuse_vocabulary(corpus: Corpus, vocab: int, option: str) -> None:
    """Raise ValueError if the data have ids that a vocabulary does not hold."""
    for name, ids in (("train", corpus.train), ("val", corpus.val)):
        parts = (ids[i : i + 2**24] for i in range(0, len(ids), 2**24))
        top = max((int(part.max()) for part in parts), default=0)
        if top >= vocab:
            raise ValueError(
                f"{corpus.name}: {name} has the token {top}, and the vocabulary {vocab} ids "
                f"({option}): it was made with another tokenizer; give vocab={top + 1} or more"
            )


def _bins(folder: Path) -> Corpus:
    """Return nanoGPT's files."""
    found, about = [], hashlib.sha256()
    for path in (folder / name for name in BINS):
        if not path.exists():
            raise ValueError(f"{path} is missing: nanoGPT's prepare.py writes both {BINS}")
        size = path.stat().st_size
        if not size or size % 2:
            raise ValueError(f"{path} has {size} bytes: give uint16 tokens, two bytes each")
        found.append(ids := np.memmap(path, np.uint16, "r"))
        # the whole of OpenWebText takes minutes: samples and sizes say enough
        about.update(str(len(ids)).encode())
        about.update(np.ascontiguousarray(ids[:: max(1, len(ids) // 2**16)]).tobytes())
    name = about.hexdigest()[:12]
    manifest = [{"name": str(folder.name), "digest": name, "tokens": len(found[0]) + len(found[1])}]
    return Corpus(folder.name, "bin", name, found[0], found[1], 0, GPT2_END, None, manifest)


# ---- documents


def read_texts(data: str, pattern: str) -> tuple[str, list[bytes], list[dict[str, Any]]]:
    """Return a name, the documents of an option `data=` as UTF-8, each once, and their manifest.

    Raises:
        ValueError: there is nothing to read, or files are not UTF-8; the error names them.
    """
    path = Path(data).expanduser()
    if pattern != "*" and data in (STDLIB, PACKAGES):
        raise ValueError(
            f"pattern={pattern}: is for a folder of text; leave it out for data={data}"
        )
    if data == STDLIB:
        root = Path(sysconfig.get_paths()["stdlib"])
        paths = (p for p in root.rglob("*.py") if not SKIPPED & {*p.relative_to(root).parts})
        texts = _unique(filter(_is_text, map(_content, sorted(paths))))
        about = {"name": "python", "version": sys.version.split()[0]}
        return STDLIB, texts, [about | _described(texts)]
    if data == PACKAGES:
        return PACKAGES, *_packages()
    if not path.is_dir():
        raise ValueError(f"data={data}: no such folder; {REMEDY}")
    texts = _folder(path, pattern)
    return path.name, texts, [{"name": path.name} | _described(texts)]


def _folder(path: Path, pattern: str) -> list[bytes]:
    hidden = (p for p in path.rglob(pattern) if not _hidden(p, path))
    files = sorted(p for p in hidden if p.is_file())
    if not files:
        raise ValueError(f"data={path}: no file there fits pattern={pattern}; {REMEDY}")
    contents = {p: p.read_bytes() for p in progress(files, len(files), f"reading {path}")}
    if bad := [p for p, content in contents.items() if not _is_text(content)]:
        names = ", ".join(str(p.relative_to(path)) for p in bad[:SHOWN])
        more = f" and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise ValueError(
            f"data={path}: not UTF-8 text: {names}{more}; leave them out with pattern='*.txt', "
            "or convert them with iconv"
        )
    texts = _unique(contents.values())
    if not texts:
        raise ValueError(f"data={path}: its files are all empty; {REMEDY}")
    return texts


def _packages() -> tuple[list[bytes], list[dict[str, Any]]]:
    """Return the Python files of the installed packages, package by package, and their manifest."""
    found: dict[str, metadata.Distribution] = {}
    for package in metadata.distributions():
        found.setdefault(str(package.metadata["Name"] or "").lower(), package)
    texts, manifest, seen = [], [], set()
    for name in progress(sorted(found), len(found), "reading packages"):
        files = sorted(f for f in found[name].files or () if f.suffix == ".py")
        paths = (Path(str(f.locate())) for f in files if not SKIPPED & {*f.parts})
        if own := _unique(filter(_is_text, map(_content, paths)), seen):
            manifest.append({"name": name, "version": found[name].version} | _described(own))
            texts += own
    if not texts:
        raise ValueError("data=packages: no installed package has Python files; give data=stdlib")
    return texts, manifest


def _described(texts: Sequence[bytes]) -> dict[str, Any]:
    return {"digest": digest_of(texts), "files": len(texts), "bytes": sum(map(len, texts))}


def digest_of(texts: Iterable[bytes]) -> str:
    """Return twelve hex digits of all documents, in their order."""
    found = hashlib.sha256()
    for text in (*texts, b"\xff"):
        found.update(len(text).to_bytes(8, "little"))
        found.update(text)
    return found.hexdigest()[:12]


def _unique(texts: Iterable[bytes], seen: set[bytes] | None = None) -> list[bytes]:
    """Return the texts that are not empty, each once, and not those of `seen`."""
    seen, kept = set() if seen is None else seen, []
    for text in texts:
        key = hashlib.sha256(text).digest()
        if text and key not in seen:
            seen.add(key)
            kept.append(text)
    return kept


def _is_text(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # listed by the package, but not there
        return b""


def _hidden(path: Path, root: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(root).parts)


def split(texts: Sequence[bytes]) -> tuple[list[bytes], list[bytes]]:
    """Documents for training and for validation, in an order that follows from their digests.

    A corpus of one document gives its end for validation.
    """
    order = sorted(texts, key=lambda text: hashlib.sha256(text).digest())
    if len(order) == 1:
        cut = len(order[0]) - max(1, int(VAL_SHARE * len(order[0])))
        while order[0][cut] & 0xC0 == 0x80:  # the middle of a character in UTF-8
            cut -= 1
        return [order[0][:cut]], [order[0][cut:]]
    wanted, size, count = VAL_SHARE * sum(map(len, order)), 0, 0
    while size < wanted and count < len(order) - 1:
        size += len(order[count])
        count += 1
    return order[count:], order[:count]


# ---- tokenizers


def _kind(tokenizer: str) -> tuple[str, int]:
    kind, _, size = str(tokenizer).partition(":")
    if kind == BYTES and not size:
        return kind, 0
    if kind == BPE and size.isdecimal() and SMALLEST <= int(size) <= MOST:
        return kind, int(size)
    raise ValueError(
        f"tokenizer={tokenizer}: choose bytes, or bpe:SIZE with a size of {SMALLEST} to {MOST}"
    )


def _key(texts: str, tokenizer: str) -> dict[str, Any]:
    """Return what tokens depend on; texts: the digest."""
    return {"texts": texts, "tokenizer": tokenizer, "share": VAL_SHARE}


def _bpe_file(cache: Path, key: dict[str, Any]) -> Path:
    return cache / f"lm-{digest(key)}.json"


def _as_bytes(texts: Sequence[bytes]) -> np.ndarray:
    """Return the bytes of all texts, each followed by the end of a document."""
    parts = [np.append(np.frombuffer(text, np.uint8), np.uint16(BYTE_END)) for text in texts]
    return np.concatenate(parts).astype(np.uint16)


def _bpe(texts: Sequence[bytes], size: int, path: Path) -> Any:
    """Return a byte-level BPE, as GPT-2's, trained on the texts or read from `path`."""
    try:
        lib = importlib.import_module("tokenizers")
    except ImportError:
        raise ValueError(
            f"tokenizer=bpe:{size} needs the package tokenizers: pip install tokenizers, "
            "or give tokenizer=bytes"
        ) from None
    if path.exists():
        with reading(path, "delete it to recreate it"):
            return lib.Tokenizer.from_file(str(path))
    made = lib.ByteLevelBPETokenizer()
    made.train_from_iterator(
        (text.decode() for text in texts), size, 0, show_progress=False, special_tokens=[END]
    )
    write_whole(path, lambda file: file.write(made.to_str().encode()), "cache_dir")
    return lib.Tokenizer.from_file(str(path))


def _encode(encoder: Any, texts: Sequence[bytes], end: int) -> np.ndarray:
    found = encoder.encode_batch([text.decode() for text in texts])
    return np.concatenate([np.array([*each.ids, end], np.uint16) for each in found])
