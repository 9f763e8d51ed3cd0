"""Token ids of a corpus: bytes, byte-pair encoding trained on it, or nanoGPT's files; cached."""

import hashlib
import importlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from experiments.common.files import digest, write_whole
from experiments.lm.corpus import Texts, read_texts
from experiments.lra.tasks.task import cached

BYTES = "bytes"
BPE = "bpe"
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
    manifest: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class Codec:
    """A tokenizer: ids of a text, without the end of a document, and the text of ids."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    vocab: int
    end: int


def load_codec(tokenizer: str, texts: str, cache_dir: str) -> Codec:
    """Return the tokenizer that `load_corpus` made; texts: their digest.

    Raises ValueError if what it learned is not in `cache_dir`.
    """
    kind, size = _kind(tokenizer)
    if kind == BYTES:
        return Codec(
            lambda text: list(text.encode()),
            lambda ids: bytes(i for i in ids if i != BYTE_END).decode(errors="replace"),
            BYTE_END + 1,
            BYTE_END,
        )
    path = _bpe_file(Path(cache_dir), _key(texts, tokenizer))
    if not path.exists():
        raise ValueError(
            f"{path} is missing, what {tokenizer} learned: name its folder with cache_dir="
        )
    encoder = _bpe((), size, path)
    return Codec(
        lambda text: encoder.encode(text).ids,
        encoder.decode,
        encoder.get_vocab_size(),
        encoder.token_to_id(END),
    )


def load_corpus(
    data: str, tokenizer: str, cache_dir: str, *, pattern: str = "*", most: int | None = None
) -> Corpus:
    """Return the token ids of an option `data=`.

    Args:
        tokenizer: bytes, or bpe:VOCABULARY. nanoGPT's files have their own.

    Raises:
        ValueError: the data or the tokenizer cannot be used; the error says why.
    """
    kind, size = _kind(tokenizer)
    folder = Path(data).expanduser()
    if any((folder / name).exists() for name in BINS):
        return _bins(folder)
    texts = read_texts(data, pattern, most)
    train, val = split(texts)
    cache, key = Path(cache_dir), _key(texts.digest, tokenizer)
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
        texts.name, tokenizer, texts.digest, **arrays, vocab=vocab, end=end,
        bytes_per_token=ratio, manifest=texts.manifest,
    )  # fmt: skip


def split(texts: Texts) -> tuple[list[bytes], list[bytes]]:
    """Documents for training and for validation, in an order that follows from their digests.

    A corpus of one document gives its end for validation.
    """
    order = sorted(texts.train, key=lambda text: hashlib.sha256(text).digest())
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


def refuse_vocabulary(corpus: Corpus, vocab: int, option: str) -> None:
    """Raise ValueError if the data have ids that a vocabulary does not hold."""
    for name, ids in (("train", corpus.train), ("val", corpus.val)):
        top = max((int(part.max()) for part in _chunks(ids)), default=0)
        if top >= vocab:
            raise ValueError(
                f"{corpus.name}: {name} has the token {top}, and the vocabulary {vocab} ids "
                f"({option}): it was made with another tokenizer; give vocab={top + 1} or more"
            )


# ---- nanoGPT's files


def _bins(folder: Path) -> Corpus:
    found = []
    for name in BINS:
        path = folder / name
        if not path.exists():
            raise ValueError(f"{path} is missing: nanoGPT's prepare.py writes both {BINS}")
        size = path.stat().st_size
        if not size or size % 2:
            raise ValueError(f"{path} has {size} bytes: give uint16 tokens, two bytes each")
        found.append(np.memmap(path, np.uint16, "r"))
    about = hashlib.sha256()
    for ids in found:  # the whole of OpenWebText takes minutes: samples and sizes say enough
        about.update(str(len(ids)).encode())
        about.update(np.ascontiguousarray(ids[:: max(1, len(ids) // 2**16)]).tobytes())
    name = about.hexdigest()[:12]
    manifest = [{"name": str(folder.name), "digest": name, "tokens": len(found[0]) + len(found[1])}]
    return Corpus(folder.name, "bin", name, found[0], found[1], 0, GPT2_END, None, manifest)


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
    out = np.full(sum(map(len, texts)) + len(texts), BYTE_END, np.uint16)
    start = 0
    for text in texts:
        out[start : start + len(text)] = np.frombuffer(text, np.uint8)
        start += len(text) + 1
    return out


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
        try:
            return lib.Tokenizer.from_file(str(path))
        except Exception as error:  # the package has no error class of its own
            raise ValueError(
                f"{path} cannot be read ({error}): delete it to recreate it"
            ) from error
    made = lib.Tokenizer(lib.models.BPE())
    made.pre_tokenizer = lib.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = lib.decoders.ByteLevel()
    trainer = lib.trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[END],
        initial_alphabet=lib.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator((text.decode() for text in texts), trainer, len(texts))
    write_whole(path, lambda file: file.write(made.to_str().encode()), "cache_dir")
    return made


def _encode(encoder: Any, texts: Sequence[bytes], end: int) -> np.ndarray:
    parts = []
    for found in encoder.encode_batch([text.decode() for text in texts]):
        parts.append(np.array([*found.ids, end], np.uint16))
    return np.concatenate(parts)


def _chunks(ids: np.ndarray, size: int = 2**24) -> Iterable[np.ndarray]:
    return (ids[i : i + size] for i in range(0, len(ids), size))
