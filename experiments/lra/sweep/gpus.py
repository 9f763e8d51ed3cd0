"""The GPUs of a sweep, and what its processes share there: MPS, and compiled code."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import torch

from experiments.common.checks import whole_number

CONTROL = "nvidia-cuda-mps-control"
SOCKETS = Path("/tmp")  # whose names must be short
DEFAULT = SOCKETS / "nvidia-mps"  # where MPS is if CUDA_MPS_PIPE_DIRECTORY does not say
MPS = SOCKETS / f"sparseflash-mps-{os.getuid()}"
QUIT = "quit -t 10\n"
SECONDS = 60  # for a command of MPS
# Makes a context as a client of MPS, and ends with 0 if there is one.
CLIENT = """
import ctypes
cuda, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_void_p()
exit(cuda.cuInit(0) or cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
"""


def slots(gpus: list[int] | None, at_once: int, processes: int = 1) -> list[str | None]:
    """The GPUs that runs may use at the same time, as CUDA_VISIBLE_DEVICES names them.

    A GPU that `at_once` runs share is there as often; None stands for the CPU.

    Args:
        gpus: numbers among the GPUs that this process sees; None: all of them.
        processes: how many GPUs each run uses ("0,1"). Those that are left over stay idle.

    Raises:
        ValueError: a GPU is not there, or there are too few.
    """
    whole_number("at_once", at_once)
    whole_number("processes", processes)
    count = torch.cuda.device_count()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
    names = seen if len(seen) == count else [str(i) for i in range(count)]
    if gpus is not None and (not isinstance(gpus, list) or not gpus):
        raise ValueError(f"gpus={gpus!r}: give a list, such as [0,1], or null for all")
    wanted = list(range(count)) if gpus is None else gpus
    if wrong := [gpu for gpu in wanted if gpu not in range(count)]:
        raise ValueError(f"gpus={wrong}: there are {count} here, counted from 0")
    if wanted and len(wanted) < processes:
        raise ValueError(f"processes={processes}: a run has {len(wanted)} GPUs, one for each")
    firsts = range(0, len(wanted) - processes + 1, processes)
    groups = [",".join(names[gpu] for gpu in wanted[i : i + processes]) for i in firsts]
    return [*(groups or [None])] * at_once


def compiler(folder: Path | None, places: int) -> dict[str, str]:
    """The environment of processes that share compiled code in a folder, and the CPU's cores.

    Runs that differ in their seed have the same code: the first compiles it, the others load it.
    None keeps the folders of the user.
    """
    cores = len(os.sched_getaffinity(0))
    found = {"TORCHINDUCTOR_COMPILE_THREADS": str(max(1, cores // places))}
    if folder is not None:
        place = folder.absolute()
        found["TORCHINDUCTOR_CACHE_DIR"] = str(place / "inductor")
        found["TRITON_CACHE_DIR"] = str(place / "triton")
    return found


@contextmanager
def shared(places: Sequence[str | None]) -> Iterator[dict[str, str]]:
    """The environment of processes that share GPUs through NVIDIA MPS, started for this block.

    Empty where no GPU is shared, and where MPS cannot be had: processes then take turns. A second
    MPS on a machine stops every program that begins to use a GPU, so all sweeps of a user share
    one, which the last of them ends, and one that runs already is used as it is.
    """
    if len(set(places)) == len(places) or places[0] is None:
        yield {}
        return
    if Path(os.environ.get("CUDA_MPS_PIPE_DIRECTORY", DEFAULT), "control").exists():
        _tell("through the MPS that runs already")
        yield {}
        return
    MPS.mkdir(mode=0o700, exist_ok=True)
    found = {"CUDA_MPS_PIPE_DIRECTORY": str(MPS), "CUDA_MPS_LOG_DIRECTORY": str(MPS)}
    with (MPS / "sweeps").open("a+") as sweeps:  # locked by each of them, and holds why MPS failed
        with _one_at_a_time():
            if _alone(sweeps):
                _call([CONTROL], found, QUIT)  # what a sweep that was killed left behind
                reason = _start(found)
                sweeps.truncate(0)
                sweeps.write(reason or "")
                sweeps.flush()
            else:
                sweeps.seek(0)
                reason = sweeps.read() or None
            fcntl.flock(sweeps, fcntl.LOCK_SH)
        _tell("through MPS" if reason is None else f"by turns, without MPS: {reason}")
        try:
            yield found if reason is None else {}
        finally:
            with _one_at_a_time():
                if _alone(sweeps):
                    _call([CONTROL], found, QUIT)


def _tell(how: str) -> None:
    print(f"runs share GPUs {how}", file=sys.stderr, flush=True)


@contextmanager
def _one_at_a_time() -> Iterator[None]:
    """No other sweep starts or ends MPS during this block."""
    with (MPS / "changes").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _alone(sweeps: IO[str]) -> bool:
    """Whether no other sweep has the file. This one then has it alone, else no longer."""
    try:
        fcntl.flock(sweeps, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def _start(environment: dict[str, str]) -> str | None:
    """Starts MPS for all GPUs; returns why it does not work, or None."""
    failed = _call([CONTROL, "-d"], environment)
    return failed or _call([sys.executable, "-c", CLIENT], environment)


def _call(command: list[str], environment: dict[str, str], text: str = "") -> str | None:
    """Runs a command of MPS; returns why it failed, or None."""
    variables = os.environ | environment
    if command[0] == CONTROL:  # clients then name GPUs as without MPS
        variables.pop("CUDA_VISIBLE_DEVICES", None)
    try:
        done = subprocess.run(
            command, input=text, text=True, timeout=SECONDS, env=variables,
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,  # the daemon holds them open
        )  # fmt: skip
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    return f"{' '.join(command[:2])} ended with {done.returncode}" if done.returncode else None
