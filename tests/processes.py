"""Python in a new process, without Triton's interpreter unless it is asked for, and a process that
ends this one where it hangs.
"""

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

WATCH = """
import os, select, signal, sys
last, parent, patience = b"start", int(sys.argv[1]), float(sys.argv[2])
while True:
    if not select.select([0], [], [], patience)[0]:
        print(f"HANG: nothing for {patience:g} s in: {last.decode()}", file=sys.stderr, flush=True)
        os.kill(parent, signal.SIGKILL)
        break
    text = os.read(0, 65536)
    if not text:
        break
    last = text.strip().split(b"\\n")[-1]
"""


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


class Watch:
    """A process that kills this one, naming what it last said, after so many seconds of silence."""

    def __init__(self, patience: float):
        command = [sys.executable, "-c", WATCH, str(os.getpid()), str(patience)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE)

    def now(self, text: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")
        self.process.stdin.flush()

    def end(self) -> None:
        self.process.communicate()
