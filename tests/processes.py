"""New processes: the ranks of a group, and Python without Triton's interpreter."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import sparseflash

ROOT = Path(__file__).resolve().parents[1]
# Forks have all modules already. Those of this process could not differentiate, once it has used
# autograd's threads, so a server without any makes them; with a GPU it cannot.
METHOD = "spawn" if torch.cuda.is_available() else "forkserver"
# What ranks import takes seconds, in each of them anew.
IMPORTED = "sparseflash", "torch._dynamo.testing", "torch.distributed.tensor.parallel", "pytest"
RUNS = "experiments.lm.run", "experiments.lra.run"
mp.get_context("forkserver").set_forkserver_preload([*IMPORTED, *RUNS])


def on_ranks(world: int, body: Callable[..., None], *arguments: Any, group: bool = True) -> None:
    """Run body(rank, world, *arguments) in so many processes; the first error is raised here.

    They have the variables of torchrun, the CPU's own backend instead of Triton's interpreter, and
    a group of gloo where it is wanted.
    """
    mp.start_processes(  # pyright: ignore[reportPrivateImportUsage]
        _rank, (world, port(), group, body, arguments), world, start_method=METHOD
    )


def port() -> int:
    """Return one that is free."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(rank: int, world: int, at: int, group: bool, body: Any, arguments: tuple) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(at), "RANK": str(rank)}
    os.environ |= {"LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    without_the_interpreter()
    torch.set_num_threads(1)
    if group:
        dist.init_process_group("gloo", rank=rank, world_size=world)
    try:
        body(rank, world, *arguments)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def without_the_interpreter() -> None:
    """Take the CPU's own backend from here on, in this process."""
    from sparseflash.backends import triton

    triton.interpreted = lambda: False
    sparseflash.clear_cache()


def in_a_new_process(*arguments: str, **environment: str) -> str:
    """Return what `python arguments` prints, run from the root of the checkout."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))  # pytest's own is not inherited
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": path} | environment, cwd=ROOT, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()
