"""One training step, entirely on the device: gather, forward, backward, clip, AdamW.

The step takes no input. It counts itself, and looks up its examples and its learning rate by that
number. So a CUDA graph can replay it without copies, and the host runs ahead of the GPU. The sums
of loss and accuracy stay on the device until they are read.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from experiments.training.device import DTYPES, WARM_UP, autocast, capture, lacks_memory, warm_up
from experiments.training.distributed import Group
from experiments.training.evaluate import Objective, Order
from experiments.training.settings import Training

ALIGN = 32  # elements: every parameter starts at a multiple of 128 bytes
AHEAD = 128  # steps whose examples are copied to the device at a time


class Trainer:
    """A model in training. `step` counts the steps taken."""

    def __init__(
        self,
        model: nn.Module,
        split: Any,  # on the device: len() and batch(rows)
        objective: Objective,
        settings: Training,
        group: Group,
    ):
        self.model, self.split, self.objective = model, split, objective
        self.group, self.device = group, group.device
        self.clip, self.seed = settings.clip, settings.seed
        self.dtype = DTYPES[settings.precision or "fp32"]
        self.parts = micro_batches(settings, group)
        self.flat = FlatParameters(model)
        self.optimizer = make_adamw(self.flat, settings.betas, settings.eps, settings.weight_decay)
        self.rate = self.optimizer.param_groups[0]["lr"]
        rates = learning_rates(settings.schedule, settings.lr, settings.warmup, settings.steps)
        spare = torch.zeros(WARM_UP)  # `prepare` may run steps beyond the last one
        self.rates = torch.cat([rates, spare]).to(self.device)
        self.order = Order(len(split), settings.batch, settings.seed)
        self.step = 0
        self._steps = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._row = torch.zeros(1, dtype=torch.int64, device=self.device)  # of `_rows`
        size = settings.batch // group.replicas
        self._rows = torch.zeros(AHEAD, size, dtype=torch.int64, device=self.device)
        self._filled = 0  # `_rows` reaches up to this step
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.steepest = torch.zeros((), device=self.device)  # the largest norm of the gradient
        self.forward: Any = model  # compiled after `prepare`, if that was asked for
        self._graph: Any = None

    # ---- the step

    def advance(self) -> None:
        """Take one step."""
        if self.step >= self._filled:
            self._fill()
        if self._graph is None:
            self._body()
        else:
            self._graph.replay()
        self.step += 1

    def _fill(self) -> None:
        rows = self.order.rows(self.step, self.step + AHEAD)[:, self.group.part(self.order.batch)]
        self._rows.copy_(rows)
        self._row.zero_()
        self._filled = self.step + AHEAD

    def _body(self) -> None:
        rows = self._rows.index_select(0, self._row).flatten()
        loss = torch.zeros((), device=self.device)
        right, count = torch.zeros_like(loss), torch.zeros_like(loss)
        for number, part in enumerate(rows.chunk(self.parts)):
            batch = self.split.batch(part)
            with autocast(self.device, self.dtype):
                found = self.objective(self.forward, batch, None)
            self.flat.gradients(found[0], add=number > 0)
            loss = loss + found[0].detach()
            right, count = right + found[1], count + found[2]
        # of sums, because the parts of a batch may predict different numbers of tokens
        world = self.group.world
        scale = world / self.group.sum(count).clamp(min=1)
        self.group.mean_(self.flat.grad)
        self.flat.grad.mul_(scale)
        norm = self.flat.clip(self.clip)
        self.rate.copy_(self.rates.index_select(0, self._steps)[0])
        self.optimizer.step()
        self._steps.add_(1)
        self._row.add_(1)
        found = torch.stack([loss * scale / world, right, count, norm.detach() / world])
        self.sums.add_(found)
        torch.maximum(self.steepest, norm.detach(), out=self.steepest)

    # ---- before the first step

    def prepare(
        self, *, compile: bool, graph: bool, parts: Callable[[], Any] | None = None
    ) -> None:
        """Run the step once and restore the state, so that kernels are compiled.

        Args:
            compile: use torch.compile.
            parts: makes the model with its parts compiled; None: it is compiled as a whole.
            graph: turn the step into a CUDA graph, on a GPU.
        """
        before = self.state()
        self._fill()
        if compile:
            torch.compiler.reset()  # runs of one process would share a limit
            self.forward = parts() if parts else torch.compile(self.model, dynamic=False)
        fits = warm_up(self._body, self.device)
        self.load(before)
        if graph and fits:
            self._fill()
            self._graph = capture(self._body, self.device)
            self.load(before)

    @property
    def compiled(self) -> bool:
        return self.forward is not self.model

    @property
    def captured(self) -> bool:
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """The memory pool of the captured step; None without one."""
        return None if self._graph is None else self._graph.pool()

    # ---- state

    def state(self) -> dict[str, Any]:
        """Return everything that the next step depends on, as copies on the CPU."""
        random = {"cpu": torch.get_rng_state()}
        if self.device.type == "cuda":
            random["cuda"] = torch.cuda.get_rng_state(self.device)
        return {
            "step": self.step,
            "model": self.weights(),
            "optimizer": {name: _copy(t) for name, t in self._moments().items()},
            "sums": _copy(self.group.sum(self.sums)),  # of all processes, of which one writes them
            "steepest": _copy(self.steepest),
            "random": random,
        }

    def weights(self) -> dict[str, Tensor]:
        return {name: _copy(t) for name, t in self.model.state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Restore a `state` in place, in the tensors that a captured step reads."""
        self.model.load_state_dict(state["model"])
        for name, tensor in self._moments().items():
            tensor.copy_(state["optimizer"][name])
        self.sums.copy_(state["sums"] / self.group.world)
        self.steepest.copy_(state["steepest"])
        self.step = state["step"]
        self._steps.fill_(self.step)
        self._filled = 0
        torch.set_rng_state(state["random"]["cpu"])
        if self.device.type == "cuda" and "cuda" in state["random"]:
            torch.cuda.set_rng_state(state["random"]["cuda"], self.device)

    def _moments(self) -> dict[str, Tensor]:
        return self.optimizer.state[self.flat.values]

    def read_sums(self, steps: int) -> dict[str, float]:
        """Return means over all steps since the last call, and the largest norm of their gradients.

        Waits for the GPU. `steps` is the number of these steps.
        """
        loss, right, count, norm = self.group.sum(self.sums).tolist()
        steepest = self.steepest.item()  # processes have the same gradient
        self.sums.zero_()
        self.steepest.zero_()
        means = {"loss": loss / steps, "accuracy": right / count, "grad_norm": norm / steps}
        return means | {"grad_norm_max": steepest}


def micro_batches(settings: Training, group: Group) -> int:
    """Return the micro-batches of a process. Raises ValueError if the batch does not divide."""
    if settings.batch % group.replicas:
        raise ValueError(
            f"batch={settings.batch} cannot be divided among {group.replicas} processes: "
            f"give a multiple of {group.replicas}"
        )
    size = settings.batch // group.replicas
    micro = min(settings.micro_batch or size, size)
    if size % micro:
        raise ValueError(f"micro_batch={micro} does not divide the {size} examples of a process")
    return size // micro


@contextmanager
def explained_memory(option: str, more: str = "") -> Iterator[None]:
    """Turn a lack of memory into a ValueError that names an option, and a remedy beside it."""
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if not lacks_memory(error):
            raise
        text = f"{option} needs more memory than there is: give a smaller one{more}"
        raise ValueError(text) from error


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


# ---- parameters as one flat vector, and its AdamW


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


def learning_rates(schedule: str, lr: float, warmup: int, steps: int) -> Tensor:
    """Return the learning rate of every step, float32 (steps,).

    onecycle is torch's OneCycleLR with linear annealing: from 1/25 up to 1, then down to 1/250,000.
    rsqrt is google's: linear warm-up, then 1 / sqrt(step); its peak is lr / sqrt(warmup).
    """

    def factor(s: int) -> float:
        first, last, top = 1 / 25, 1 / 25e4, min(warmup, steps) - 1
        warm = min(1.0, (s + 1) / max(1, warmup))
        if schedule == "onecycle" and s <= top:
            return first + (1 - first) * (s / top if top else 1)
        if schedule == "onecycle":
            return 1 + (last - 1) * (s - top) / (steps - 1 - top)
        if schedule == "cosine" and s >= warmup:
            return 0.5 * (1 + math.cos(math.pi * (s - warmup) / max(1, steps - warmup)))
        return warm / math.sqrt(max(s + 1, warmup, 1)) if schedule == "rsqrt" else warm

    return torch.tensor([lr * factor(s) for s in range(steps)], dtype=torch.float32)
