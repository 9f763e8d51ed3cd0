"""A trained classifier of Pathfinder images, for questions about images outside its task."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from experiments.common.checks import whole_number
from experiments.common.devices import find_device
from experiments.lra.finished import load_model, run_settings
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import PATHFINDER, SPLITS, Split, Task, pixel_order
from experiments.pathfinder.generate import Images, check_seed, make
from experiments.pathfinder.parameters import Spec, spec
from experiments.training.device import autocast
from experiments.training.settings import PRECISIONS


@dataclass(frozen=True)
class Trained:
    """The best model of a run, and what it was trained on."""

    settings: Settings
    model: nn.Module
    order: np.ndarray  # of the pixels, as in the run
    device: torch.device
    dtype: torch.dtype

    @property
    def size(self) -> int:
        return PATHFINDER[self.settings.task["name"]]

    def spec(self, strokes: float | None = None) -> Spec:
        """Returns the parameters of the run's images, with other strokes if given."""
        task = self.settings.task
        look: dict[str, Any] = {name: task.get(name) for name in ("margins", "distractors")}
        look["documented"] = task.get("documented") or False
        return spec(self.size, task.get("difficulty") or 14, strokes=strokes, **look)

    def fresh(self, spec: Spec, seed: int, examples: int) -> Images:
        """Returns images of both labels that the run was not trained on.

        Raises ValueError for the seed of its training data, and if all labels are the same.
        """
        check_seed(seed)
        whole_number("examples", examples)
        if self.settings.task.get("generate") and seed == self.settings.data_seed:
            raise ValueError(f"seed={seed}: the run was trained on images of this seed")
        images = make(spec, seed, 0, examples)
        if len(np.unique(images.labels)) < 2:
            raise ValueError(f"examples={examples}: all have the same label; give more")
        return images

    @torch.no_grad()
    def answers(self, pixels: np.ndarray, batch: int) -> Tensor:
        """Returns the logits, float32 (n, 2) on the CPU, of uint8 images (n, N, N).

        batch: images that the model sees at a time.
        """
        whole_number("batch", batch)
        tokens = torch.from_numpy(pixels.reshape(len(pixels), -1)[:, self.order])
        with autocast(self.device, self.dtype):
            logits = [
                self.model(part.to(self.device)).float().cpu() for part in tokens.split(batch)
            ]
        return torch.cat(logits)


def trained(run: str | Path, device: str | None = None) -> Trained:
    """Returns the model of a run of experiments.train.

    Args:
        run: its folder, with config.yaml and weights.pt or checkpoint.pt.
        device: None for cuda if there is a GPU, else cpu.

    Raises:
        ValueError: no such run or device, or a run of another task.
    """
    folder = Path(run)
    settings = run_settings(folder)
    name = settings.task.get("name")
    if name not in PATHFINDER or settings.pretrain:
        what = f"{name}, {settings.pretrain}" if settings.pretrain else name
        raise ValueError(f"run={folder}: give a classifier of Pathfinder; this run is of {what}")
    place, size = find_device(device), PATHFINDER[name]
    return Trained(
        settings=settings,
        model=_model(folder, settings, size).to(place).eval(),
        order=pixel_order((size, size), settings.task.get("order") or "row"),
        device=place,
        dtype=PRECISIONS[settings.precision] if place.type == "cuda" else torch.float32,
    )


def _model(folder: Path, settings: Settings, size: int) -> nn.Module:
    blank = Split(np.zeros((1, size * size), np.uint8), np.zeros(1, np.int64))
    task = Task(
        name=settings.task["name"],
        source="generated",
        classes=2,
        vocab=256,
        splits=dict.fromkeys(SPLITS, blank),
        grid=(size, size),
    )
    return load_model(folder, settings, task)[0]
