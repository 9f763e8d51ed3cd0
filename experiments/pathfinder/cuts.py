"""Does a trained model follow the curve? What it says when paddles of the curve are left out.

    python -m experiments.pathfinder.cuts run=docs/results/lra/path_x/128-c14
    python -m experiments.pathfinder.cuts run=runs/train/pathfinder32/flash/seed0 'erased=[0,4]'

Paddles are left out in the middle of the curve, or at both marks. A model that follows the curve
minds both; one that goes by the directions at the marks does not notice the first.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import hydra
import numpy as np
import torch
from omegaconf import DictConfig, ListConfig, OmegaConf
from torch import Tensor, nn

from experiments.checks import whole_number
from experiments.pathfinder.generate import Images, check_seed, make, redraw
from experiments.pathfinder.parameters import spec
from experiments.pathfinder.render import ORIGIN
from experiments.tasks.task import PATHFINDER, SPLITS, Split, Task, pixel_order
from experiments.training import checkpoint, initial
from experiments.training.begin import CONFIG
from experiments.training.config import PRECISIONS, Settings, device_type
from experiments.training.step import autocast


def answers(config: DictConfig) -> tuple[float, list[tuple[int, float, float]]]:
    """How often the model says that a curve leads from mark to mark: of images without one; and for
    each n of `erased` of those with one, n paddles being left out in its middle, or at its ends.

    Raises ValueError for a value that is none, and a folder without such a run.
    """
    check_seed(config.seed)
    for name in ("examples", "batch"):
        whole_number(name, config[name])
    folder = Path(config.run)
    settings = _settings(folder)
    size, task = PATHFINDER[settings.task["name"]], settings.task
    each = spec(
        size,
        task.get("difficulty") or 14,
        documented=task.get("documented") or False,
        strokes=task.get("strokes"),
    )
    erased = config.erased
    if not isinstance(erased, ListConfig) or not erased:
        raise ValueError(f"erased={erased!r}: give a list of numbers of paddles, such as [0,4]")
    if wrong := [n for n in erased if n not in range(each.contour + 1)]:
        raise ValueError(f"erased={wrong}: the curve has {each.contour} paddles")
    if task.get("generate") and config.seed == settings.data_seed:
        raise ValueError(f"seed={config.seed}: the run was trained on images of this seed")
    name = config.device or ("cuda" if torch.cuda.is_available() else "cpu")
    on_gpu, device = device_type(name) == "cuda", torch.device(name)
    dtype = PRECISIONS[settings.precision] if on_gpu else torch.float32
    model = _model(folder, settings, size).to(device).eval()
    order = pixel_order((size, size), task.get("order") or "row")
    images = make(each, config.seed, 0, config.examples)
    if len(np.unique(images.labels)) < 2:
        raise ValueError(f"examples={config.examples}: all have the same label; give more")

    def yes(label: int, without: np.ndarray) -> float:
        pixels = redraw(images, each, ~without)[images.labels == label]
        tokens = torch.from_numpy(pixels.reshape(len(pixels), -1)[:, order])
        return _share_of_yes(model, tokens.split(config.batch), device, dtype)

    none = np.zeros(images.placed.shape[:2], bool)
    rows = []
    for n in erased:
        middle = yes(1, on_curve(images, each.contour, n, middle=True))
        marks = yes(1, on_curve(images, each.contour, n, middle=False)) if n else middle
        rows.append((n, middle, marks))
        print(f"{n} of {each.contour} left out", file=sys.stderr, flush=True)
    return yes(0, none), rows


@torch.no_grad()
def _share_of_yes(
    model: nn.Module, batches: Sequence[Tensor], device: torch.device, dtype: torch.dtype
) -> float:
    with autocast(device, dtype):
        said = [model(tokens.to(device)).argmax(1) for tokens in batches]
    return torch.cat(said).float().mean().item()


def on_curve(images: Images, contour: int, n: int, *, middle: bool) -> np.ndarray:
    """bool (n, paddles): n paddles of the snake with the first mark, in its middle or at its ends.

    Where a curve leads from mark to mark, that snake is the curve.
    """
    number = np.arange(contour)
    first = (contour - n) // 2
    chosen = (number >= first) & (number < first + n)
    if not middle:
        chosen = (number < n - n // 2) | (number >= contour - n // 2)
    # snakes grow in turn: paddle j of snake i is number 2 j + i
    paddles = 2 * number[chosen][None] + images.info[:, ORIGIN][:, None]
    found = np.zeros(images.placed.shape[:2], bool)
    np.put_along_axis(found, paddles, True, 1)
    return found


def _settings(folder: Path) -> Settings:
    """The settings of a run on Pathfinder; ValueError for a folder without."""
    path = folder / CONFIG
    if not path.exists():
        raise ValueError(f"run={folder}: no {CONFIG} there; give the folder of a run")
    try:
        values = OmegaConf.to_container(OmegaConf.load(path))
        settings = Settings(**{str(name): value for name, value in dict(values).items()})  # type: ignore
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path} has not the settings of a run: {error}") from error
    name = settings.task.get("name")
    if name not in PATHFINDER or settings.pretrain:
        what = f"{name}, {settings.pretrain}" if settings.pretrain else name
        raise ValueError(f"run={folder}: a classifier of Pathfinder is wanted, and this is {what}")
    return settings


def _model(folder: Path, settings: Settings, size: int) -> nn.Module:
    blank = Split(np.zeros((1, size * size), np.uint8), np.zeros(1, np.int64))
    task = Task(
        name=settings.task["name"],
        source="generated",
        classes=2,
        vocab=256,
        length=size * size,
        pair=False,
        grid=(size, size),
        splits=dict.fromkeys(SPLITS, blank),
        baselines={},
    )
    model = initial.make_model(settings, task)
    weights = folder / checkpoint.WEIGHTS
    initial.start_from(
        model, weights if weights.exists() else folder, initial.about(settings, task)
    )
    return model


@hydra.main(version_base="1.3", config_path="../conf", config_name="cuts")
def main(config: DictConfig) -> None:
    try:
        none, rows = answers(config)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(1)
    print("| paddles left out | in the middle | at the marks |", "|---:|---:|---:|", sep="\n")
    for n, *shares in rows:
        print("|".join(["", f" {n} ", *(f" {100 * share:.1f} " for share in shares), ""]))
    print(f"\nsays yes to so many images with a curve (%); without one to {100 * none:.1f}")


if __name__ == "__main__":
    main()
