"""Images by (seed, index), one or many at a time, and as arrays on disk."""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from experiments.common.files import digest
from experiments.pathfinder.parameters import ANTIALIAS, Spec
from experiments.pathfinder.render import INFO, MARGIN, draw_images, make_images
from experiments.pathfinder.store import filled
from experiments.pathfinder.tables import tables

VERSION = 2  # of the images: raise it with every change of the image of a (seed, index)


@dataclass(frozen=True)
class Images:
    """Consecutive images with what the generator knows about them."""

    pixels: np.ndarray  # uint8 (n, N, N)
    info: np.ndarray  # int64 (n, INFO), columns as named in render
    placed: np.ndarray  # int64 (n, paddles, 4): snake, direction, row, column of the paddle's start
    counts: np.ndarray  # int64 (n,): paddles of every image

    @property
    def labels(self) -> np.ndarray:
        return self.info[:, 0].astype(np.uint8)


def make(spec: Spec, seed: int, first: int, n: int, pixels: np.ndarray | None = None) -> Images:
    """Return images first .. first + n - 1 of a seed.

    They are the same however many are made at a time, and in however many threads.

    pixels: uint8 (n, N, N) to write them into. None makes a new array.
    """
    check_seed(seed)
    paddles = 2 * spec.contour + spec.distractors * spec.distractor_length
    images = Images(
        np.empty((n, spec.size, spec.size), np.uint8) if pixels is None else pixels,
        np.zeros((n, INFO), np.int64),
        np.zeros((n, paddles, 4), np.int64),
        np.zeros(n, np.int64),
    )
    for which, margin in enumerate(spec.margins):
        make_images(
            tables(spec, margin), which, len(spec.margins), seed, first, 2 * spec.seed_distance,
            spec.contour, spec.distractor_length, spec.distractors, spec.contrast,
            images.pixels, images.info, images.placed, images.counts,
        )  # fmt: skip
    return images


def redraw(images: Images, spec: Spec, kept: np.ndarray) -> np.ndarray:
    """Return the images with only the paddles that `kept`, bool (n, paddles), names."""
    pixels = np.empty_like(images.pixels)
    for which, margin in enumerate(spec.margins):
        draw_images(
            tables(spec, margin), which, spec.contrast,
            images.info, images.placed, images.counts, kept, pixels,
        )  # fmt: skip
    return pixels


def ends(images: Images, spec: Spec) -> np.ndarray:
    """Return row and column of both ends of every paddle, (n, paddles, 2, 2), as they are drawn.

    The start of the patch comes first. The other end lies on half a pixel.
    """
    angle = np.zeros(images.placed.shape[:2])  # from the columns towards the rows
    for which, margin in enumerate(spec.margins):
        ring, own = tables(spec, margin).ring, images.info[:, MARGIN] == which
        direction = images.placed[own, :, 1]
        at = ring[np.minimum(direction, len(ring) - 1)]
        degrees = (direction - len(ring) - 180) * (np.pi / 180)
        # a grown paddle points back from its head
        grown = np.arctan2(-at[..., 0], -at[..., 1])
        angle[own] = np.where(direction < len(ring), grown, degrees)
    start = images.placed[:, :, 2:]
    way = ANTIALIAS * spec.length * np.stack([np.sin(angle), np.cos(angle)], -1)
    return np.stack([start, start + np.ceil(way - 1e-9) / ANTIALIAS], 2)


def check_seed(seed: int) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
        raise ValueError(f"seed={seed!r}: give a whole number from 0 to 2**63 - 1")


def on_disk(
    specs: Sequence[Spec],
    seed: int,
    first: int,
    n: int,
    cache_dir: Path,
) -> tuple[np.ndarray, np.ndarray]:
    """Return images first .. first + n - 1 of a seed and their labels, kept in `cache_dir`.

    The images are uint8 (n, N, N), mapped from the disk, and the labels uint8 (n,). They are made
    once. An interrupted call (Ctrl-C, kill) continues where it stopped.

    specs: of one size. Images take several in turn.
    """
    check_seed(seed)
    one, count = specs[0], len(specs)
    described = asdict(one) if count == 1 else [asdict(spec) for spec in specs]
    key = {"version": VERSION, "spec": described, "seed": seed, "first": first, "n": n}
    path = cache_dir / f"pathfinder{one.size}-{digest(key)}.npy"

    def run(start: int, pixels: np.ndarray) -> np.ndarray:
        if count == 1:
            return make(one, seed, first + start, len(pixels), pixels).labels
        labels = [
            make(specs[number % count], seed, number, 1, pixels[i : i + 1]).labels
            for i, number in enumerate(range(first + start, first + start + len(pixels)))
        ]
        return np.concatenate(labels)

    what = f"Pathfinder-{one.size}, contour {one.contour}"
    return filled(path, (n, one.size, one.size), run, what=what)
