"""Which versions of Triton the Hopper kernels run with.

Tested versions run at once. The kernels use parts of Triton that change, so a newer version first
runs the self-check, once for each GPU and source. Its verdict is kept in a file.
"""

import hashlib
import json
import os
import subprocess
import sys
import warnings
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from sparseflash.kernels.common.versions import TESTED, is_tested, release

_OLDEST, _NEWEST = (".".join(map(str, numbers)) for numbers in (TESTED[0], TESTED[-1]))
_SECONDS = 900  # for the self-check: most of it compiles


def too_old(version: str) -> str | None:
    """Why no kernel can be compiled with a version of Triton, or None."""
    if release(version) >= TESTED[0]:
        return None
    return (
        f"its kernels need Triton {_OLDEST} or newer, this is {version};"
        " install torch 2.11 or newer, which brings it"
    )


def refused(version: str, device: torch.device) -> str | None:
    """Why the kernels do not run with a version of Triton on a device, or None."""
    if is_tested(version):
        return None
    reason = _verdict(version, torch.cuda.get_device_name(device), device)
    if reason is None:
        return None
    return f"{_untested(version)}, and its self-check failed: {reason}"


def note(version: str, device: torch.device) -> str | None:
    """Return what a user should know where the kernels do run, or None."""
    if is_tested(version) or refused(version, device):
        return None
    return f"{_untested(version)}; the self-check passed"


def _untested(version: str) -> str:
    return f"Triton {version} is not among the tested versions ({_OLDEST} to {_NEWEST})"


@cache
def _verdict(version: str, gpu: str, device: torch.device) -> str | None:
    """Why the self-check failed, now or the last time, or None."""
    path = _file(version, gpu)
    with suppress(OSError, ValueError, KeyError, TypeError, RecursionError):  # damaged or none
        return json.loads(path.read_text())["reason"]
    warnings.warn(
        f"{_untested(version)}: checking the Hopper kernels once, for a minute or two", stacklevel=2
    )
    reason = run_self_check(device)
    if reason is not None:
        reason += f"; delete {path} to check again"
    with suppress(OSError):  # without the file, the next process checks again
        path.parent.mkdir(parents=True, exist_ok=True)
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps({"triton": version, "gpu": gpu, "reason": reason}))
        new.replace(path)
    return reason


def _file(version: str, gpu: str) -> Path:
    """Where the verdict is kept: it holds for a version, a GPU and the source of this package."""
    digest = hashlib.sha256(f"{version}\n{gpu}\n".encode())
    package = Path(__file__).parents[2]
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + path.read_bytes())
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return caches / "sparseflash" / f"hopper-triton-{version}-{digest.hexdigest()[:16]}.json"


def run_self_check(device: torch.device) -> str | None:
    """Run the self-check in a process of its own, because a faulty kernel can end a process or
    hang it. Returns why it failed, or None.
    """
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "sparseflash.backends.hopper.self_check", str(device)]
    try:
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"it did not end within {_SECONDS} s"
    except OSError as error:
        return f"its process did not start ({error})"
    try:
        return json.loads(done.stdout.splitlines()[-1])["reason"]
    except (IndexError, KeyError, ValueError):
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        return f"its process ended with status {done.returncode} ({last[:200]})"
