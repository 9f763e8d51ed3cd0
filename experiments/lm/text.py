"""Text as token ids: documents of folders, of Python's library or of packages, and tokenizers.

Ids are bytes, byte-pair encoding trained on the text, or those of nanoGPT's files.
"""

import hashlib
import importlib
import sysconfig
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.files import digest, reading, write_whole
from experiments.common.work import progress
from experiments.lra.tasks.task import cached

STDLIB, PACKAGES = "stdlib", "packages"
SKIPPED = {"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"}
REMEDY = "give a folder of text, or of train.bin and val.bin, or stdlib, packages, or mqar:16"

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
    name, texts = read_texts(data, pattern)
    train, val = split(texts)
    cache = Path(cache_dir)
    key = {"texts": digest_of(texts), "tokenizer": tokenizer, "share": VAL_SHARE}
    if kind == BYTES:
        arrays = {"train": _as_bytes(train), "val": _as_bytes(val)}
        vocab, end = BYTE_END + 1, BYTE_END
    else:
        encoder = _bpe(train, size, cache / f"lm-{digest(key)}.json")
        vocab, end = encoder.get_vocab_size(), encoder.token_to_id(END)

        def make() -> dict[str, np.ndarray]:
            return {"train": _encode(encoder, train, end), "val": _encode(encoder, val, end)}

        arrays = cached(cache, "lm", key, make)
    ratio = sum(map(len, val)) / max(1, len(arrays["val"]))
    parts = arrays["train"], arrays["val"]
    return Corpus(name, tokenizer, key["texts"], *parts, vocab, end, ratio)


def refuse_vocabulary(corpus: Corpus, vocab: int, option: str) -> None:
    """Raise ValueError if the data have ids that a vocabulary does not hold."""
    for name, ids in (("train", corpus.train), ("val", corpus.val)):
        if (top := int(ids.max(initial=0))) >= vocab:
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
    train, val = found
    return Corpus(folder.name, "bin", about.hexdigest()[:12], train, val, 0, GPT2_END, None)


# ---- documents


def read_texts(data: str, pattern: str) -> tuple[str, list[bytes]]:
    """Return a name, and the documents of an option `data=` as UTF-8, each once.

    Raises:
        ValueError: there is nothing to read, or files are not UTF-8; the error names them.
    """
    if data in (STDLIB, PACKAGES):
        if pattern != "*":
            raise ValueError(f"pattern={pattern} is for a folder of text, not for data={data}")
        contents = map(_content, _stdlib() if data == STDLIB else _packages())
        return data, _unique(filter(_is_text, contents))
    root = Path(data).expanduser()
    if not root.is_dir():
        raise ValueError(f"data={data}: no such folder; {REMEDY}")
    names = {p: p.relative_to(root) for p in sorted(root.rglob(pattern)) if p.is_file()}
    files = [p for p, name in names.items() if not any(part[0] == "." for part in name.parts)]
    contents = {p: p.read_bytes() for p in progress(files, len(files), f"reading {root}")}
    if bad := [names[p] for p, content in contents.items() if not _is_text(content)]:
        raise ValueError(
            f"data={root}: {len(bad)} files are not UTF-8 text, such as {bad[0]}; leave them out "
            "with pattern='*.txt', or convert them with iconv"
        )
    if not (texts := _unique(contents.values())):
        raise ValueError(f"data={root}: no text there fits pattern={pattern}; {REMEDY}")
    return root.name, texts


def _stdlib() -> Iterable[Path]:
    root = Path(sysconfig.get_paths()["stdlib"])
    return sorted(p for p in root.rglob("*.py") if not SKIPPED & {*p.relative_to(root).parts})


def _packages() -> Iterable[Path]:
    """Yield the Python files of the installed packages, package by package."""
    found: dict[str, metadata.Distribution] = {}
    for package in metadata.distributions():
        found.setdefault(str(package.metadata["Name"] or "").lower(), package)
    for name in progress(sorted(found), len(found), "reading packages"):
        files = sorted(f for f in found[name].files or () if f.suffix == ".py")
        yield from (Path(str(f.locate())) for f in files if not SKIPPED & {*f.parts})


def digest_of(texts: Iterable[bytes]) -> str:
    """Return twelve hex digits of all documents, in their order."""
    found = hashlib.sha256()
    for text in (*texts, b"\xff"):
        found.update(len(text).to_bytes(8, "little"))
        found.update(text)
    return found.hexdigest()[:12]


def _unique(texts: Iterable[bytes]) -> list[bytes]:
    """Return the texts that are not empty, each once."""
    return [text for text in dict.fromkeys(texts) if text]


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
        if find_spec("tokenizers") is None:
            raise ValueError(f"tokenizer={tokenizer}: pip install tokenizers, or take bytes")
        return kind, int(size)
    raise ValueError(
        f"tokenizer={tokenizer}: choose bytes, or bpe:SIZE with a size of {SMALLEST} to {MOST}"
    )


def _as_bytes(texts: Sequence[bytes]) -> np.ndarray:
    """Return the bytes of all texts, each followed by the end of a document."""
    parts = [np.append(np.frombuffer(text, np.uint8), np.uint16(BYTE_END)) for text in texts]
    return np.concatenate(parts).astype(np.uint16)


def _bpe(texts: Sequence[bytes], size: int, path: Path) -> Any:
    """Return a byte-level BPE, as GPT-2's, trained on the texts or read from `path`."""
    lib = importlib.import_module("tokenizers")
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
