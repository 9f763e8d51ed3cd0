"""The model of a run: made, started from the weights of another run, described."""

import hashlib
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from experiments.common.files import reading
from experiments.lra.models.classifier import Classifier
from experiments.lra.models.positions import upsample_positions
from experiments.lra.settings import Settings
from experiments.lra.tasks.task import Task, pixel_order
from experiments.training import state as checkpoint
from masks import BlockMask
from sparseflash import BlockSparseAttention
from sparseflash.distributed import ContextParallel

POSITIONS = "positions"  # the name of the position table
REMEDY = "give the folder of a finished run"
HEADS = ("head.", "lm_head.", "hidden_token")  # parameters that belong to one objective


def make_model(settings: Settings, task: Task) -> Classifier:
    """Return the classifier of a run on a task, with fresh weights, in float32 on the CPU."""
    order = None if task.grid is None else pixel_order(task.grid, _order(settings))
    shape = (task.vocab, task.length, task.classes, task.pair, task.grid)
    return Classifier(*shape, settings.sizes, settings.kind(), order, task.pad_black)


def _order(settings: Settings) -> str:
    return settings.task.get("order") or "row"


def mask_of(model: Classifier, settings: Settings) -> tuple[str | None, float | None]:
    """Return the mask that a model uses, as text, and its density at the model's length.

    The text is that of mask=, or of the default. The density is the mean over the layers, in the
    blocks that they take. Both are None for an attention without a mask.
    """
    if not model.masks:
        return None, None
    layers = [m for m in model.modules() if isinstance(m, BlockSparseAttention)]
    blocks = [_blocks(layer.mask, model, layer.heads) for layer in layers]
    density = fmean(mask.density for mask in blocks)
    return blocks[0].text if settings.mask is None else settings.mask, density


def mask_digest(model: Classifier) -> str | None:
    """Return a digest of all pairs that the masks of a model allow, None for an attention without
    one. It does not depend on the block size.
    """
    heads = model.config.heads
    keys = [_blocks(mask, model, heads).key for mask in model.masks]
    return hashlib.sha256("".join(keys).encode()).hexdigest()[:12] if keys else None


def _blocks(mask: Any, model: Classifier, heads: int) -> BlockMask:
    mask = mask.mask if isinstance(mask, ContextParallel) else mask
    return mask if isinstance(mask, BlockMask) else mask.build(model.states, heads=heads)


def load_model(folder: Path, settings: Settings, task: Task) -> tuple[Classifier, int]:
    """Return the model of a run with its best weights, on the CPU, and their step.

    Raises:
        ValueError: there are no weights, the file is damaged, its shapes do not fit the model, or
            the mask allows other pairs now.
    """
    found = checkpoint.weights_file(folder)
    if found is None:
        raise ValueError(f"run={folder}: no {checkpoint.WEIGHTS} there; {REMEDY}")
    weights, step, about = checkpoint.load_weights(found, REMEDY)
    model = make_model(settings, task)
    refuse_other_pairs(found, about, model)
    with reading(found, REMEDY, "is not of the model that run.json describes"):
        model.load_state_dict(weights)
    return model, step


# ---- weights of another run


def origin(settings: Settings, task: Task, model: Classifier) -> dict[str, Any]:
    """Return what `start_from` and `refuse_other_pairs` have to know of the run of a checkpoint."""
    return {
        "task": task.name,
        "grid": None if task.grid is None else list(task.grid),
        "order": _order(settings),
        "pretrain": settings.pretrain,
        "pairs": mask_digest(model),
    }


def refuse_other_pairs(path: Path, about: dict[str, Any], model: Classifier) -> None:
    """Raise ValueError if the masks of a model are not those that its weights learned."""
    pairs = mask_digest(model)
    if about.get("pairs", pairs) != pairs:  # committed weights lack it
        raise ValueError(
            f"{path} was trained when the mask of the same text allowed other pairs: restore its "
            "pattern, or train in another folder with name="
        )


@torch.no_grad()
def start_from(
    model: nn.Module, folder: str | Path, here: dict[str, Any], *, fresh_head: bool = False
) -> str:
    """Copy the best weights of another run into the model; returns what it did.

    Positions of a coarser grid are upsampled. The head keeps its fresh weights with `fresh_head`,
    and if the other run had another objective or other classes. So do random features and hashes
    whose number depends on the length.

    Args:
        folder: of the other run, or a file of weights.
        here: the `origin` of this run.

    Raises:
        ValueError: there is no such run, its file is damaged, or its model does not fit.
    """
    given = Path(folder)
    path = given if given.suffix == ".pt" else checkpoint.weights_file(given)
    if path is None or not path.exists():
        raise ValueError(f"init_from={folder}: no weights there; give the folder of a run")
    remedy = "init_from= takes the folder of a run, or its weights; give another one"
    weights, step, there = checkpoint.load_weights(path, remedy)
    if "order" not in there:
        raise ValueError(f"init_from={folder}: these are not the weights of a classifier")
    buffers, own = dict(model.named_buffers()), model.state_dict(keep_vars=True)
    fresh, other = [], fresh_head or there["pretrain"] != here["pretrain"]
    odd = [name for name in weights if name not in own and not name.startswith(HEADS)]
    for name, parameter in own.items():
        found, in_head = weights.get(name), name.startswith(HEADS)
        if name == POSITIONS and found is not None and found.shape != parameter.shape:
            found = _upsampled(found, there, here, folder)
        fits = found is not None and found.shape == parameter.shape
        if fits and not (in_head and other):
            parameter.copy_(found)
        elif in_head or name in buffers:
            fresh.append(name)
        else:
            odd.append(name)
    if odd:
        shapes = [tuple(x[odd[0]].shape) if odd[0] in x else "missing" for x in (own, weights)]
        raise ValueError(
            f"init_from={folder}: {odd[0]} is {shapes[0]} here, {shapes[1]} there; "
            "the model and the attention must be those of that run"
        )
    kept = f"fresh: {', '.join(fresh)}" if fresh else "all of them"
    return f"weights of step {step} of {path.parent} ({there['task']}; {kept})"


def _upsampled(table: Tensor, there: dict, here: dict, folder: str | Path) -> Tensor:
    if there["grid"] is None or here["grid"] is None:
        raise ValueError(
            f"init_from={folder}: that run has {len(table)} positions; only images can change them"
        )
    grids = [tuple(side["grid"]) for side in (there, here)]
    orders = [pixel_order(grid, x["order"]) for grid, x in zip(grids, (there, here), strict=True)]
    return upsample_positions(table, *grids, from_order=orders[0], to_order=orders[1])
