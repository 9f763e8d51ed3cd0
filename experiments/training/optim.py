"""Parameters as one flat vector, its AdamW, and a table of learning rates."""

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

ALIGN = 32  # elements: every parameter starts at a multiple of 128 bytes


class FlatParameters:
    """The parameters of a model as views of one vector, with one gradient vector.

    Clipping, averaging over processes and AdamW are then one kernel each for all layers.
    """

    def __init__(self, model: nn.Module):
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        first = self.parameters[0]
        if any(p.dtype != first.dtype or p.device != first.device for p in self.parameters):
            raise ValueError("the parameters of a model must have one dtype and one device")
        sizes = [-(-p.numel() // ALIGN) * ALIGN for p in self.parameters]
        flat = first.new_zeros(sum(sizes))
        for parameter, place in zip(self.parameters, flat.split(sizes), strict=True):
            view = place[: parameter.numel()].view(parameter.shape)
            view.copy_(parameter.data)
            parameter.data = view
        self.padding = [
            first.new_zeros(size - p.numel())
            for size, p in zip(sizes, self.parameters, strict=True)
        ]
        self.values = nn.Parameter(flat)
        self.values.grad = torch.zeros_like(flat)
        self.grad: Tensor = self.values.grad

    def gradients(self, loss: Tensor, *, add: bool) -> None:
        """Write the gradients of a loss into `grad`, or adds them to it."""
        found = torch.autograd.grad(loss, self.parameters, allow_unused=True)
        parts = []
        for gradient, parameter, padding in zip(found, self.parameters, self.padding, strict=True):
            gradient = torch.zeros_like(parameter) if gradient is None else gradient
            parts += [gradient.reshape(-1), padding] if len(padding) else [gradient.reshape(-1)]
        if add:
            self.grad.add_(torch.cat(parts))
        else:
            torch.cat(parts, out=self.grad)

    def clip(self, max_norm: float | None) -> Tensor:
        """Scales the gradient to a norm of at most `max_norm`; returns its norm before."""
        norm = torch.linalg.vector_norm(self.grad)
        if max_norm is not None:
            self.grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
        return norm


def make_adamw(
    flat: FlatParameters, betas: Sequence[float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW with its learning rate as a tensor on the device, so that a CUDA graph can replay it.

    Its state is created here, not in the first step, so that a checkpoint can be copied into it.
    """
    values = flat.values
    on_gpu = values.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        [values],
        lr=torch.zeros((), device=values.device),
        betas=(betas[0], betas[1]),
        eps=eps,
        weight_decay=weight_decay,
        capturable=on_gpu,
        fused=on_gpu,
        foreach=False,
    )
    optimizer.state[values] = {
        "step": torch.zeros((), device=values.device if on_gpu else "cpu"),
        "exp_avg": torch.zeros_like(flat.grad),
        "exp_avg_sq": torch.zeros_like(flat.grad),
    }
    return optimizer


# ---- learning rates: the factor of the peak rate at step s of n, with w steps of warm-up


def _onecycle(s: int, w: int, n: int) -> float:
    """torch's OneCycleLR with linear annealing: from 1/25 up to 1, then down to 1/250,000."""
    first, last, top, end = 1 / 25, 1 / 25e4, min(w, n) - 1, n - 1
    if s <= top:
        return first + (1 - first) * (s / top if top else 1)
    return 1 + (last - 1) * (s - top) / (end - top)


def _cosine(s: int, w: int, n: int) -> float:
    if s < w:
        return (s + 1) / w
    return 0.5 * (1 + math.cos(math.pi * (s - w) / max(1, n - w)))


def _rsqrt(s: int, w: int, n: int) -> float:
    """google LRA: linear warm-up, then 1 / sqrt(s); the peak is lr / sqrt(w)."""
    return min(1.0, (s + 1) / max(1, w)) / math.sqrt(max(s + 1, w, 1))


def _constant(s: int, w: int, n: int) -> float:
    return min(1.0, (s + 1) / max(1, w))


FACTORS = {"onecycle": _onecycle, "cosine": _cosine, "rsqrt": _rsqrt, "constant": _constant}


def learning_rates(schedule: str, lr: float, warmup: int, steps: int) -> Tensor:
    """Return the learning rate of every step, float32 (steps,)."""
    factors: Iterable[float] = (FACTORS[schedule](s, warmup, steps) for s in range(steps))
    return torch.tensor([lr * factor for factor in factors], dtype=torch.float32)
