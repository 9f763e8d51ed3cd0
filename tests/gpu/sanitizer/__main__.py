"""Run compute-sanitizer's tools over the Hopper kernels, and print a table of their reports.

    python -m tests.gpu.sanitizer
    python -m tests.gpu.sanitizer --tools racecheck --programs record

The programs are calls of every kind, and the two protocols that a tool objects to, each alone and
with variants that are wrong. Every program runs without a tool first. The exit status is 0 if all
results are right and the tools report the wrong variants; what they report besides is to be read.
docs/internals/synchronisation.md says what that means.
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from tests.gpu.sanitizer.programs import PROGRAMS, WRONG
from tests.gpu.sanitizer.reports import TOOLS, count, places, remarks

ROOT = Path(__file__).resolve().parents[3]
KERNELS = "attention_forward|backward_|merge_parts|exchange_records|swap_halves"
TOOLKIT = "/usr/local/cuda/bin/compute-sanitizer"


class Sanitizer:
    """The program compute-sanitizer, and where its logs go."""

    def __init__(self, path: str, logs: Path, barriers: int, patience: float):
        self.path, self.logs, self.barriers, self.patience = path, logs, barriers, patience

    def version(self) -> str:
        done = subprocess.run([self.path, "--version"], capture_output=True, text=True, check=True)
        return next(line for line in done.stdout.splitlines() if "ersion" in line)

    def run(self, tool: str, program: str) -> str:
        """The log of a tool over a program; empty if it took too long."""
        place = self.logs / f"{tool} {program}.log".replace(" ", "_")
        command = [
            self.path, "--tool", tool, "--log-file", str(place), "--print-limit", "0",
            "--num-cuda-barriers", str(self.barriers), "--kernel-name", f"regex={KERNELS}",
            "--check-exit-code", "no",
        ]  # fmt: skip
        if not _ends_well([*command, *_python(program)], self.patience):
            print(f"{tool}, {program}: the program failed, see {place}", file=sys.stderr)
        return place.read_text() if place.exists() else ""


def _python(program: str) -> list[str]:
    return [sys.executable, "-m", "tests.gpu.sanitizer.programs", program]


def _ends_well(command: list[str], patience: float) -> bool:
    try:
        done = subprocess.run(command, cwd=ROOT, timeout=patience, stdout=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return False
    return done.returncode == 0


def table(tools: Iterable[str], programs: Iterable[str], sanitizer: Sanitizer) -> list[str]:
    """Prints a row for each program as it ends; what is wrong, in words."""
    faults, details, tools = [], [], list(tools)
    print(f"{'program':24}" + "".join(f"{tool:>11}" for tool in ("result", *tools)))
    for program in programs:
        right = _ends_well(_python(program), sanitizer.patience)
        if not right:
            faults.append(f"{program}: its result is wrong, without any tool")
        cells = ["right" if right else "wrong"] if program not in WRONG else ["any"]
        for tool in tools:
            log = sanitizer.run(tool, program)
            reports = count(tool, log)
            cells.append("none" if reports is None else str(reports))
            if reports is None:
                faults.append(f"{program}: {tool} gave no summary")
            elif WRONG.get(program) == tool and not reports:
                faults.append(f"{program}: wrong, but {tool} does not say so")
            details += [f"{tool}, {program}: {text}" for text in remarks(log)]
            if reports:
                named = places(log).most_common(8)
                details += [f"{tool}, {program}: {n} x {place}" for place, n in named]
        print(f"{program:24}" + "".join(f"{cell:>11}" for cell in cells), flush=True)
    print(*details, sep="\n")
    return faults


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--tools", nargs="*", default=TOOLS, choices=TOOLS)
    parser.add_argument("--programs", default="", help="only those whose names contain this")
    parser.add_argument("--sanitizer", help="path of compute-sanitizer")
    parser.add_argument("--logs", type=Path, help="folder for the logs")
    parser.add_argument("--barriers", type=int, default=0, help="mbarriers; 0: as compiled")
    parser.add_argument("--patience", type=float, default=900, help="seconds for one run")
    options = parser.parse_args()
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
        sys.exit("nothing was run: the Hopper kernels need a GPU of compute capability 9.0")
    path = options.sanitizer or shutil.which("compute-sanitizer") or TOOLKIT
    if not os.access(path, os.X_OK):
        sys.exit(
            f"nothing was run: there is no compute-sanitizer in PATH or at {path}; it comes with"
            " the CUDA toolkit, or give --sanitizer"
        )
    logs = options.logs or Path(tempfile.mkdtemp(prefix="sanitizer-"))
    logs.mkdir(parents=True, exist_ok=True)
    sanitizer = Sanitizer(path, logs, options.barriers, options.patience)
    print(f"{torch.cuda.get_device_name()}; {sanitizer.version()}; logs in {logs}")
    chosen = [name for name in PROGRAMS if options.programs in name]
    if faults := table(options.tools, chosen, sanitizer):
        sys.exit("\n".join(faults))


if __name__ == "__main__":
    main()
