"""Train a large language model on very long windows for a few steps, on all GPUs of a host.

    torchrun --nproc-per-node 8 -m experiments.tools.long_step
    torchrun --nproc-per-node 4 -m experiments.tools.long_step tokens=2048 layers=2 heads=4 \\
        kv_heads=2 head_dim=16 mask='sliding(256) & causal()' vocabulary=64 chunk=256

All ranks share each window (sparseflash.distributed), and FSDP2 shards the weights over them. The
defaults are 32:8 heads of 128, 8 layers and a million tokens. The text repeats itself every
`chunk` tokens, so the loss falls. One row tells the slowest rank's median of a step after the
first three, which compile, and the largest memory of a rank.
"""

import os
import shlex
import statistics
import sys
import time
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import masks
from experiments.common.rows import Rows
from sparseflash import BlockSparseAttention, Rotary
from sparseflash.distributed import ContextParallel, context_parallel


@dataclass
class Options:
    tokens: int = 2**20
    mask: str = "sliding(32768) & causal()"
    layers: int = 8
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    vocabulary: int = 32768
    steps: int = 10
    chunk: int = 8192  # tokens of which the logits are in memory at once
    rows: str = "runs/long_step.jsonl"


class Layer(nn.Module):
    def __init__(self, o: Options, plan: ContextParallel):
        super().__init__()
        width = o.heads * o.head_dim
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(2))
        self.attention = BlockSparseAttention(
            width, o.heads, kv_heads=o.kv_heads, mask=plan, rotary=Rotary()
        )
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norms[0](x))
        return x + self.mlp(self.norms[1](x))


class Model(nn.Module):
    def __init__(self, o: Options, plan: ContextParallel):
        super().__init__()
        width, self.chunk = o.heads * o.head_dim, o.chunk
        self.embedding = nn.Embedding(o.vocabulary, width)
        self.head = nn.Linear(width, o.vocabulary)
        self.layers = nn.ModuleList(Layer(o, plan) for _ in range(o.layers))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Return the sum of the losses of the tokens here. x and y: (tokens,), integers."""
        x = self.embedding(x)[None]
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        parts = zip(x[0].split(self.chunk), y.split(self.chunk), strict=True)
        losses = [checkpoint(self._loss, a, b, use_reentrant=False) for a, b in parts]
        return torch.stack(losses).sum()

    def _loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).float(), y, reduction="sum")


def main(arguments: list[str]) -> None:
    made = OmegaConf.merge(OmegaConf.structured(Options), OmegaConf.from_cli(arguments))
    o: Options = OmegaConf.to_object(made)  # type: ignore[assignment]
    mask, cuda = masks.parse(o.mask), torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    plan = context_parallel(None, mask, o.tokens, heads=o.heads, kv_heads=o.kv_heads)
    torch.manual_seed(0)
    with device:
        model = Model(o, plan)
    half = MixedPrecisionPolicy(torch.bfloat16, torch.float32) if cuda else MixedPrecisionPolicy()
    for layer in [*model.layers, model]:
        fully_shard(layer, mp_policy=half)
    optimizer = torch.optim.AdamW(model.parameters(), 3e-4)
    text = torch.randint(o.vocabulary, (o.chunk,), generator=torch.Generator().manual_seed(0))
    text = text.repeat(o.tokens // o.chunk + 2)[: o.tokens + 1].to(device)
    x, y = plan.shard(text[:-1], 0), plan.shard(text[1:], 0)
    seconds: list[float] = []
    losses: list[float] = []
    for step in range(o.steps):
        dist.barrier()
        begin = time.perf_counter()
        loss = model(x, y)
        (loss * (world / o.tokens)).backward()  # FSDP2 averages over the ranks
        optimizer.step()
        optimizer.zero_grad()
        loss = loss.detach() / o.tokens
        dist.all_reduce(loss)
        losses.append(loss.item())
        slowest = torch.tensor(time.perf_counter() - begin, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        seconds.append(slowest.item())
        if rank == 0:
            print(f"step {step + 1}: loss {losses[-1]:.3f}, {seconds[-1]:.2f} s", flush=True)
    peak = torch.tensor(torch.cuda.max_memory_allocated() if cuda else 0, device=device)
    dist.all_reduce(peak, dist.ReduceOp.MAX)
    if rank == 0:
        command = shlex.join(["torchrun", f"--nproc-per-node={world}", "-m", __spec__.name])
        row = asdict(o) | {"ranks": world, "parameters": sum(p.numel() for p in model.parameters())}
        row |= {"s_median": statistics.median(seconds[3:] or seconds), "losses": losses}
        row |= {"peak_gib": peak.item() / 2**30, "status": "ok"}
        rows = Rows(o.rows, ["tokens", "ranks", "layers", "heads"])
        rows.append(row | rows.origin(device, f"{command} {shlex.join(arguments)}"))
        print(f"{row['s_median']:.3g} s a step, {row['peak_gib']:.3g} GiB; row: {o.rows}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1:])
