"""Python in a new process, without Triton's interpreter unless it is asked for."""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def in_a_new_process(*arguments: str, **environment: str) -> str:
    """What `python arguments` prints, run from the root of the checkout."""
    inherited = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    path = os.pathsep.join(filter(None, [str(ROOT), *sys.path]))  # pytest's own is not inherited
    done = subprocess.run(
        [sys.executable, *arguments],
        env=inherited | {"PYTHONPATH": path} | environment, cwd=ROOT, text=True,
        capture_output=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout.strip()
