"""Texts without their near-duplicates, by MinHash (Broder, 1997).

Two texts are near-duplicates if they share about 70 % of their runs of five words.
"""

import re
import zlib

import numpy as np

SHINGLE = 5  # words
BANDS, BAND = 16, 4  # of a signature: files that share a band are compared
SAME = 0.7  # share of equal signatures
_DRAW = np.random.default_rng(2022)
MULTIPLIERS = _DRAW.integers(1, 2**63, BANDS * BAND, np.uint64) * np.uint64(2) + np.uint64(1)


class Distinct:
    """Texts that are no near-duplicates of each other."""

    def __init__(self):
        self.signatures: list[np.ndarray] = []
        self.shelves: dict[bytes, list[int]] = {}  # the texts with the same band

    def add(self, text: bytes) -> bool:
        """Take a text, unless it is a near-duplicate of one taken before."""
        own = signature(text)
        bands = [bytes([i]) + part.tobytes() for i, part in enumerate(np.split(own, BANDS))]
        near = {i for band in bands for i in self.shelves.get(band, ())}
        if any((self.signatures[i] == own).mean() >= SAME for i in near):
            return False
        for band in bands:
            self.shelves.setdefault(band, []).append(len(self.signatures))
        self.signatures.append(own)
        return True


def signature(text: bytes) -> np.ndarray:
    """Return the MinHash of the runs of SHINGLE words, case and punctuation apart: uint64 (64,)."""
    words = re.findall(rb"[0-9a-z_\x80-\xff]+", text.lower()) or [b""]
    words += [b""] * (SHINGLE - len(words))
    ids = np.array([zlib.crc32(word) for word in words], np.uint64)
    runs = np.zeros(len(ids) - SHINGLE + 1, np.uint64)
    for i in range(SHINGLE):
        runs = _mixed(runs + ids[i : i + len(runs)])
    return (np.unique(runs)[:, None] * MULTIPLIERS).min(0)


def _mixed(x: np.ndarray) -> np.ndarray:
    """Well distributed uint64 values, one for each different value."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    return (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
