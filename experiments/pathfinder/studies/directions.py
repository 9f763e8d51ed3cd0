"""How fast a small model learns the direction of a paddle, and whether this carries over to images
of another size.

    python -m experiments.pathfinder.studies.directions model.rotary=true
    python -m experiments.pathfinder.studies.directions strokes=128 model.embedding=table,smooth -m

The model classifies crops around the first mark of an image by the direction of the paddle there,
in eight classes. A model needs this before it can follow a contour. It takes a minute on a CPU.
"""

import sys
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from experiments.common.checks import check_options
from experiments.common.program import program
from experiments.lra.models.classifier import Classifier, model_config
from experiments.pathfinder.generate import check_seed, headings, make
from experiments.pathfinder.parameters import Spec, spec
from experiments.pathfinder.render import MARKERS, ORIGIN

CLASSES = 8
TESTED = 1000  # crops of each size
EVERY = 100  # steps between two lines of progress


def crops(each: Spec, seed: int, n: int, side: int, shift: int) -> tuple[Tensor, Tensor]:
    """Returns crops around the first mark of n images, int32 (n, side * side), and their classes,
    int64 (n,).

    shift: how many pixels the mark may be off the middle. Pixels beyond the border are 0.
    """
    images = make(each, seed, 0, n)
    angle = headings(images, each)[np.arange(n), images.info[:, ORIGIN]]
    classes = np.floor(angle % (2 * np.pi) / (2 * np.pi) * CLASSES).astype(np.int64) % CLASSES
    rng = np.random.default_rng(seed)
    corners = images.info[:, MARKERS : MARKERS + 2] - side // 2
    corners = corners + rng.integers(-shift, shift + 1, corners.shape)
    wide = np.pad(images.pixels, ((0, 0), (side, side), (side, side)))
    found = [
        image[y + side : y + 2 * side, x + side : x + 2 * side]
        for image, (y, x) in zip(wide, corners, strict=True)
    ]
    pixels = np.stack(found).reshape(n, -1).astype(np.int32)
    return torch.from_numpy(pixels), torch.from_numpy(classes)


def learn(options: dict[str, Any]) -> tuple[float, float, float]:
    """Trains a model, and returns the mean loss of the last steps and two test accuracies: on crops
    of images of `size` and of `other`.

    Raises ValueError for an option out of range.
    """
    seed, side, shift, steps = (options[name] for name in ("seed", "side", "shift", "steps"))
    check_seed(seed)
    check_options(options, whole="examples side steps batch warmup", positive="lr")
    own = spec(options["size"], options["contour"], strokes=options["strokes"])
    other = spec(options["other"], own.contour)
    if side > (most := min(own.size, other.size)):
        raise ValueError(f"side={side}: give at most {most}, the side of the images")
    if shift not in range(side // 2 + 1):
        raise ValueError(f"shift={shift!r}: give 0 to {side // 2}, half of side")
    x, y = crops(own, seed, options["examples"], side, shift)
    # other images than those for training, at both sizes
    tests = [crops(each, seed + 1, TESTED, side, shift) for each in (own, other)]
    torch.manual_seed(seed)
    sizes = model_config(**options["model"])
    model = Classifier(256, side**2, CLASSES, grid=(side, side), model=sizes)
    lr = options["lr"]
    optimizer = torch.optim.AdamW(model.parameters(), lr, (0.9, 0.98), weight_decay=0.0)
    losses: list[float] = []
    for step in range(1, steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, step / options["warmup"])
        rows = torch.randint(len(x), (options["batch"],))
        loss = F.cross_entropy(model(x[rows]), y[rows])
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
        if step % EVERY == 0:
            recent = sum(losses[-EVERY:]) / EVERY
            print(f"step {step} of {steps}  loss {recent:.3f}", file=sys.stderr, flush=True)
    last = losses[-EVERY:]
    found = [accuracy(model, *test) for test in tests]
    return sum(last) / len(last), found[0], found[1]


@torch.no_grad()
def accuracy(model: Classifier, x: Tensor, y: Tensor) -> float:
    model.eval()
    right = torch.cat([model(part) for part in x.split(100)]).argmax(1) == y
    model.train()
    return right.float().mean().item()


@program("directions", module="experiments.pathfinder.studies.directions")
def main(options: dict[str, Any], command: str) -> None:
    loss, own, other = learn(options)
    names = ("embedding", "positions", "rotary")
    model = ", ".join(f"{name} {options['model'][name]}" for name in names)
    strokes = f" with the strokes of {options['strokes']}" if options["strokes"] else ""
    print(
        f"{model}: loss {loss:.2f}, test {100 * own:.1f} % on {options['size']}{strokes}, "
        f"{100 * other:.1f} % on {options['other']}",
        flush=True,
    )


if __name__ == "__main__":
    main()
