"""One training step, all of it on the device: gather, forward, backward, clip, AdamW.

The step takes no input: it counts itself, and looks up which examples and which learning rate are
its own. So a CUDA graph replays it with nothing to copy, and the host runs ahead of the GPU; the
sums of loss and accuracy wait on the device until they are read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from experiments.lra.training import graph
from experiments.lra.training.config import PRECISIONS, Settings
from experiments.lra.training.data import DeviceSplit, Order, stream
from experiments.lra.training.distributed import Group
from experiments.lra.training.memory import lacks_memory
from experiments.lra.training.objective import Objective
from experiments.lra.training.optim import FlatParameters, learning_rates, make_adamw

AHEAD = 128  # steps whose examples are copied to the device at a time


class Trainer:
    """A model in training. `step` is how many steps it has taken."""

    def __init__(
        self,
        model: nn.Module,
        split: DeviceSplit,
        objective: Objective,
        settings: Settings,
        group: Group,
    ):
        self.model, self.split, self.objective = model, split, objective
        self.group, self.device = group, group.device
        self.clip, self.seed = settings.clip, settings.seed
        self.dtype = PRECISIONS[settings.precision]
        self.parts = parts(settings, group)
        self.flat = FlatParameters(model)
        self.optimizer = make_adamw(self.flat, settings.betas, settings.eps, settings.weight_decay)
        self.rate = self.optimizer.param_groups[0]["lr"]
        rates = learning_rates(settings.schedule, settings.lr, settings.warmup, settings.steps)
        spare = torch.zeros(graph.WARM_UP)  # `prepare` looks beyond the last step
        self.rates = torch.cat([rates, spare]).to(self.device)
        self.order = Order(len(split), settings.batch, settings.seed)
        self.step = 0
        self._steps = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._row = torch.zeros(1, dtype=torch.int64, device=self.device)  # of `_rows`
        size = settings.batch // group.world
        self._rows = torch.zeros(AHEAD, size, dtype=torch.int64, device=self.device)
        self._filled = 0  # `_rows` reaches up to this step
        self.sums = torch.zeros(4, dtype=torch.float64, device=self.device)
        self.steepest = torch.zeros((), device=self.device)  # the largest norm of a gradient
        self._forward: Any = model
        self._graph: Any = None

    # ---- the step

    def advance(self) -> None:
        """Takes one step."""
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
            tokens, lengths, labels = self.split.batch(part)
            with autocast(self.device, self.dtype):
                found = self.objective(self._forward, tokens, lengths, labels, None)
            share = found[0] / (found[2].clamp(min=1) * self.parts)
            self.flat.gradients(share, add=number > 0)
            loss = loss + share.detach()
            right, count = right + found[1], count + found[2]
        self.group.mean_(self.flat.grad)
        norm = self.flat.clip(self.clip)
        self.rate.copy_(self.rates.index_select(0, self._steps)[0])
        self.optimizer.step()
        self._steps.add_(1)
        self._row.add_(1)
        self.sums.add_(torch.stack([loss, right, count, norm.detach()]))
        torch.maximum(self.steepest, norm.detach(), out=self.steepest)

    # ---- before the first step

    def prepare(self, *, compile: bool, capture: bool, tell: Callable[[str], None]) -> None:
        """Tries the step and leaves no trace of it: kernels are compiled, memory is known to do.

        With `capture` the step becomes a CUDA graph, on a GPU.
        """
        before = self.state()
        self._fill()
        if compile:
            torch.compiler.reset()  # else the runs of a sweep count as one that keeps changing
            self._forward = torch.compile(self.model, dynamic=False)
        try:
            fits = graph.warm_up(self._body, self.device)
        except Exception as error:
            if not compile or lacks_memory(error):
                raise
            tell(f"without torch.compile, which failed ({_first_line(error)})")
            self._forward = self.model
            self.load(before)
            fits = graph.warm_up(self._body, self.device)
        self.load(before)
        if capture and fits:
            self._fill()
            self._graph = graph.capture(self._body, self.device)
            self.load(before)

    @property
    def compiled(self) -> bool:
        return self._forward is not self.model

    @property
    def captured(self) -> bool:
        return self._graph is not None

    @property
    def pool(self) -> Any:
        """The memory of the captured step; None without one."""
        return None if self._graph is None else self._graph.pool()

    # ---- what a checkpoint holds

    def state(self) -> dict[str, Any]:
        """Everything that the next step depends on, as copies on the CPU."""
        return {
            "step": self.step,
            "model": self.weights(),
            "optimizer": {name: _copy(t) for name, t in self._moments().items()},
            "sums": _copy(self.sums),
            "steepest": _copy(self.steepest),
            "random": random_state(self.device),
        }

    def weights(self) -> dict[str, Tensor]:
        return {name: _copy(t) for name, t in self.model.state_dict().items()}

    def load(self, state: dict[str, Any]) -> None:
        """Puts a `state` in place, in the tensors that a captured step knows."""
        self.model.load_state_dict(state["model"])
        for name, tensor in self._moments().items():
            tensor.copy_(state["optimizer"][name])
        self.sums.copy_(state["sums"])
        self.steepest.copy_(state.get("steepest", torch.zeros(())))  # older runs have none
        self.step = state["step"]
        self._steps.fill_(self.step)
        self._filled = 0
        set_random_state(state["random"], self.device)

    def _moments(self) -> dict[str, Tensor]:
        return self.optimizer.state[self.flat.values]

    def read_sums(self, steps: int) -> dict[str, float]:
        """Means over the last `steps` steps, all since the last call, and the largest norm of their
        gradients. Waits for the GPU.
        """
        loss, right, count, norm = self.group.sum(self.sums).tolist()
        steepest = self.steepest.item()  # processes have the same gradient
        self.sums.zero_()
        self.steepest.zero_()
        steps *= self.group.world
        means = {"loss": loss / steps, "accuracy": right / count, "grad_norm": norm / steps}
        return means | {"grad_norm_max": steepest}


def parts(settings: Settings, group: Group) -> int:
    """Into how many pieces each process cuts its part of the batch."""
    if settings.batch % group.world:
        raise ValueError(
            f"batch={settings.batch} cannot be shared by {group.world} processes: "
            f"give a multiple of {group.world}"
        )
    size = settings.batch // group.world
    micro = min(settings.micro_batch or size, size)
    if size % micro:
        raise ValueError(f"micro_batch={micro} does not divide the {size} examples of a process")
    return size // micro


def autocast(device: torch.device, dtype: torch.dtype) -> torch.autocast:
    """bf16 where that is wanted; nothing in float32."""
    return torch.autocast(device.type, torch.bfloat16, enabled=dtype == torch.bfloat16)


def seed_everything(seed: int, rank: int) -> None:
    """Starts torch's random streams; those of rank 0 are the same however many processes run."""
    torch.manual_seed(stream(seed, rank))


def random_state(device: torch.device) -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    torch.set_rng_state(state["cpu"])
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(state["cuda"], device)


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
