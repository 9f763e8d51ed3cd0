"""A probe sees the two marks of an image and k paddles at each. Everything else is blank to it.

An image of only these paddles is drawn from the ends of the paddles, so the probe gets the ends. It
gets the marks in random order, because no image shows which of them begins its curve.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from experiments.common.files import digest, read_arrays, write_whole
from experiments.common.progress import progress
from experiments.common.threads import threads
from experiments.pathfinder.generate import VERSION, Images, ends, make
from experiments.pathfinder.parameters import Spec
from experiments.pathfinder.render import LABEL, MARKERS, ORIGIN

PART = 2000  # images of a file
RUN = 50  # images that a thread makes at a time: under a second, so Ctrl-C works
BATCH, WIDTH, BLOCKS, RATE = 512, 128, 2, 4e-3


def seen(images: Images, spec: Spec) -> np.ndarray:
    """Returns rows and columns, float32 (n, 2, 1 + 2 contour, 2), for each of the two marks: its
    place, and the near and the far end of the paddles from it on."""
    info, contour = images.info, spec.contour
    # the first mark is on the tail of its snake, the second on the head of the same or the other
    snakes = info[:, ORIGIN], np.where(info[:, LABEL] == 1, info[:, ORIGIN], 1 - info[:, ORIGIN])
    # a seed starts at its tail, the others at their head
    both = ends(images, spec)[:, : 2 * contour].reshape(len(info), contour, 2, 2, 2).copy()
    both[:, 1:] = both[:, 1:, :, ::-1]
    of = np.arange(len(info))
    ways = both[of, :, snakes[0]], both[of, ::-1, snakes[1], ::-1]
    marks = info[:, MARKERS : MARKERS + 4].reshape(-1, 2, 1, 2)
    paddles = np.stack(ways, 1).reshape(len(info), 2, 2 * contour, 2)
    return np.concatenate([marks, paddles], 2).astype(np.float32)


def seen_on_disk(
    spec: Spec, seed: int, first: int, n: int, cache_dir: Path
) -> tuple[Tensor, Tensor]:
    """Returns `seen` of images first .. first + n - 1 of a seed, and their labels.

    They are kept in files of PART images. An interrupted call continues with the next file.
    """
    key = {"version": VERSION, "spec": asdict(spec), "seed": seed}
    folder = cache_dir / f"pathfinder{spec.size}-seen-{digest(key)}"
    found, starts = [], range(first // PART * PART, first + n, PART)
    what = f"Pathfinder-{spec.size}, contour {spec.contour}, {PART} images at a time"
    with threads() as pool:
        for start in progress(starts, len(starts), what):
            path = folder / f"{start}.npz"
            if not path.exists():
                x, y = _seen_of_part(pool, spec, seed, start)
                write_whole(
                    path, lambda file, x=x, y=y: np.savez(file, seen=x, labels=y), "cache_dir"
                )
            arrays = read_arrays(path, "delete it to recreate it")
            found.append((arrays["seen"], arrays["labels"]))
    begin = first - starts[0]
    both = (np.concatenate(parts)[begin : begin + n] for parts in zip(*found, strict=True))
    x, labels = map(torch.from_numpy, both)
    return x, labels


def _seen_of_part(
    pool: ThreadPoolExecutor, spec: Spec, seed: int, start: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns `seen` and the labels of PART images from number `start` on."""

    def run(first: int) -> tuple[np.ndarray, np.ndarray]:
        images = make(spec, seed, first, min(RUN, start + PART - first))
        return seen(images, spec), images.labels

    x, labels = zip(*pool.map(run, range(start, start + PART, RUN)), strict=True)
    return np.concatenate(x), np.concatenate(labels)


class Probe(nn.Module):
    """A perceptron of residual layers over lengths, places and directions of what it sees."""

    def __init__(self, spec: Spec, paddles: int):
        super().__init__()
        self.paddles, self.size, self.length = paddles, spec.size, spec.length
        width = len(self._features(torch.zeros(1, 2, 1 + 2 * paddles, 2))[0])
        self.first = nn.Linear(width, WIDTH)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH)
            )
            for _ in range(BLOCKS)
        )
        self.last = nn.Sequential(nn.GELU(), nn.Linear(WIDTH, 1), nn.Flatten(0))

    def forward(self, x: Tensor) -> Tensor:
        """Returns the logits (n,) that a curve joins the marks.

        x: (n, 2, 1 + 2 paddles or more, 2), as `seen` has it. The order of the marks has no effect.
        """
        x = x[:, :, : 1 + 2 * self.paddles]
        return (self.one_order(x) + self.one_order(x.flip(1))) / 2

    def one_order(self, x: Tensor) -> Tensor:
        """Returns the logits for the marks in their order."""
        x = self.first(self._features(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def _features(self, x: Tensor) -> Tensor:
        x = (x - self.size / 2) / (self.size / 4)
        marks, loose = x[:, :, 0], x[:, :, -1]
        found = [*_between(marks), marks]
        if self.paddles:
            steps = x.diff(dim=2) * (self.size / 8 / self.length)
            turned = torch.cat([_turned(steps, pair) for pair in (marks, loose)], -1)
            found += [*_between(loose), loose, (x[:, :, 1:] - x[:, :, :1]) * 2, steps, turned]
        return torch.cat([part.flatten(1) for part in found], 1)


def _between(pair: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The way between two places, (n, 2, 2), its length and the logarithm of that."""
    way = pair[:, 1] - pair[:, 0]
    length = way.norm(dim=1, keepdim=True)
    return 2 * way, 2 * length, length.clamp_min(0.01).log()


def _turned(steps: Tensor, pair: Tensor) -> Tensor:
    """Steps in the axes of the way between two places."""
    way = pair[:, 1] - pair[:, 0]
    along = way / way.norm(dim=1, keepdim=True).clamp_min(1e-6)
    across = torch.stack([-along[:, 1], along[:, 0]], 1)
    return torch.einsum("nmpi,nji->nmpj", steps, torch.stack([along, across], 1))


def fit(
    spec: Spec,
    paddles: int,
    x: Tensor,
    labels: Tensor,
    *,
    steps: int,
    seed: int,
    device: torch.device,
) -> Probe:
    """Returns a probe trained on what it sees of n images, and their labels."""
    x, y = x[:, :, : 1 + 2 * paddles].to(device), labels.to(device).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        probe = Probe(spec, paddles)
    probe.to(device)
    optimizer = torch.optim.AdamW(probe.parameters(), weight_decay=1e-2)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, RATE, total_steps=steps)
    what = f"probe of {paddles} paddles, Pathfinder-{spec.size}"
    for _ in progress(range(steps), steps, what):
        rows = torch.randint(len(x), (BATCH,), generator=generator).to(device)
        other = torch.randint(2, (BATCH, 1, 1, 1), generator=generator).to(device).bool()
        images = torch.where(other, x[rows].flip(1), x[rows])
        loss = binary_cross_entropy_with_logits(probe.one_order(images), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    return probe.eval()


@torch.no_grad()
def says_yes(probe: Probe, x: Tensor) -> Tensor:
    """Returns whether the probe answers that a curve joins the marks, bool (n,) on the CPU."""
    device = next(probe.parameters()).device
    return torch.cat([probe(part.to(device)).cpu() for part in x.split(10_000)]) > 0
