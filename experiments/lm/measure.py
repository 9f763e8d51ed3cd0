"""What a trained model is asked: its loss at every position, and the memory of a step."""

from typing import Any

import torch
from torch import Tensor, nn

from experiments.lm.settings import Settings
from experiments.lm.windows import Windows
from experiments.training.device import MIB, autocast
from experiments.training.settings import PRECISIONS


@torch.no_grad()
def by_position(model: nn.Module, windows: Windows, batch: int, dtype: torch.dtype) -> list[float]:
    """The mean cross-entropy at every position of a window."""
    device = windows.ids.device
    sums = torch.zeros(windows.context, dtype=torch.float64, device=device)
    model.eval()
    for rows in torch.arange(len(windows), device=device).split(batch):
        tokens, _, targets = windows.batch(rows)
        with autocast(device, dtype):
            sums += model(tokens, targets).double().sum(0)
    model.train()
    return (sums / len(windows)).tolist()


def saved_mib(trainer: Any, settings: Settings) -> float | None:
    """MiB that a micro-batch keeps from its forward to its backward pass, without the weights.

    Counted in the model that is not compiled, each storage once. None where it does not fit.
    """
    found: dict[int, tuple[int, Tensor]] = {}
    own = {p.untyped_storage().data_ptr() for p in trainer.model.parameters()}

    def pack(tensor: Tensor) -> Tensor:
        # detached, or the graph and its hook would hold each other for ever
        storage, kept = tensor.untyped_storage(), tensor.detach()
        if storage.data_ptr() not in own:
            found[storage.data_ptr()] = (storage.nbytes(), kept)  # alive, so addresses differ
        return kept

    state = torch.get_rng_state()
    size = settings.batch // trainer.group.world // trainer.parts
    rows = torch.arange(size, device=trainer.device) % len(trainer.split)
    try:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            with autocast(trainer.device, PRECISIONS[settings.precision]):
                loss, _, _ = trainer.objective(trainer.model, trainer.split.batch(rows), None)
        total = sum(size for size, _ in found.values()) / MIB
        del loss
    except torch.OutOfMemoryError:
        return None
    finally:
        torch.set_rng_state(state)
    return total
