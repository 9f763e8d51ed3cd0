"""How well the marks, and the paddles at them, predict the label without following a curve.

A classifier needs a higher accuracy than these to show that it follows curves. One at the first of
them may only measure the distance between the marks.
"""

import numpy as np
import torch
from torch import nn

from experiments.pathfinder.generate import Images, headings, make
from experiments.pathfinder.parameters import Spec
from experiments.pathfinder.render import LABEL, MARKERS, ORIGIN

PADDLES = 3  # at each mark, at most
STEPS, BATCH, WIDTH = 1500, 512, 128


def shortcuts(each: Spec, seed: int, n: int) -> list[float]:
    """Returns test accuracies of a small perceptron on n images, a fifth of them for the test.

    The first uses only the two marks, the others also the first 1, 2, .. PADDLES paddles at each.
    """
    images = make(each, seed, 0, n)
    return [_fit(x, images.info[:, LABEL], seed) for x in _features(images, each)]


def _features(images: Images, each: Spec) -> list[np.ndarray]:
    """Returns float32 (n, features) for 0 .. PADDLES paddles at each mark."""
    info, row = images.info, np.arange(len(images.info))
    start, heading = images.placed[:, :, 2:].astype(float), headings(images, each)
    # the first mark is on the tail of its snake, the second on the head of the same or the other
    tail = info[:, ORIGIN]
    head = np.where(info[:, LABEL] == 1, tail, 1 - tail)
    marks = info[:, MARKERS : MARKERS + 4].reshape(-1, 2, 2).astype(float)
    line = marks[:, 1] - marks[:, 0]
    towards = np.arctan2(line[:, 0], line[:, 1])
    columns = [np.hypot(*line.T), *marks.reshape(-1, 4).T]
    found = [np.stack(columns, 1)]
    for k in range(min(PADDLES, each.contour)):
        ends = (0, 2 * k + tail), (1, 2 * (each.contour - 1 - k) + head)
        for mark, paddle in ends:  # snakes grow in turn: paddle j of snake i is number 2 j + i
            angle = heading[row, paddle]
            turn = angle - towards - mark * np.pi
            place = start[row, paddle] - marks[:, mark]
            columns += [np.cos(turn), np.sin(turn), np.cos(angle), np.sin(angle), *place.T]
        found.append(np.stack(columns, 1))
    return [x.astype(np.float32) for x in found]


def _fit(features: np.ndarray, labels: np.ndarray, seed: int) -> float:
    x, y = torch.from_numpy(features), torch.from_numpy(labels).float()
    n = len(x) * 4 // 5
    x = (x - x[:n].mean(0)) / (x[:n].std(0) + 1e-6)
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = nn.Sequential(
            nn.Linear(x.shape[1], WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH), nn.GELU(),
            nn.Linear(WIDTH, 1), nn.Flatten(0),
        )  # fmt: skip
    optimizer = torch.optim.AdamW(net.parameters(), 2e-3, weight_decay=1e-2)
    rates = torch.optim.lr_scheduler.OneCycleLR(optimizer, 4e-3, total_steps=STEPS)
    for _ in range(STEPS):
        rows = torch.randint(n, (BATCH,), generator=generator)
        loss = nn.functional.binary_cross_entropy_with_logits(net(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        rates.step()
    with torch.no_grad():
        return ((net(x[n:]) > 0) == (y[n:] > 0)).float().mean().item()


def table(found: dict[tuple[int, int], list[float]]) -> str:
    """Returns a Markdown table of accuracies in percent by (size, contour)."""
    names = ["marks", *(f"{k} paddle{'s' * (k > 1)} at each" for k in range(1, PADDLES + 1))]
    lines = [f"| size | contour | {' | '.join(names)} |", "|---" * (len(names) + 2) + "|"]
    for (size, contour), accuracies in found.items():
        cells = " | ".join(f"{100 * accuracy:.1f}" for accuracy in accuracies)
        lines.append(f"| {size} | {contour} | {cells} |")
    return "\n".join(lines)
