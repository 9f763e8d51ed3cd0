"""A program that stands in for experiments.train, and what it noted."""

import json
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path

from experiments.lra.sweep.queue import Queue

# Notes when it begins and ends, and completes its run.
TRAIN = """
import json, os, signal, sys, time
from pathlib import Path
place = Path(sys.argv[1])
given = dict(x.split("=", 1) for x in sys.argv[2:])
name, data = given["name"], given.get("data_only") == "true"
def note(event):
    line = {"run": name, "event": ("data " if data else "") + event, "at": time.monotonic()}
    line |= {"gpu": os.environ.get("CUDA_VISIBLE_DEVICES")}
    names = "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TORCHINDUCTOR_COMPILE_THREADS"
    line |= {"compiled": [os.environ.get(name) for name in names]}
    with open(place / "notes", "a") as file: file.write(json.dumps(line) + "\\n")
if name in os.environ.get("DEAF", "").split(","): signal.signal(signal.SIGTERM, signal.SIG_IGN)
note("begin")
print("hello", flush=True)
if name in os.environ.get("KILLED", "").split(",") and not data: os.kill(os.getpid(), 9)
time.sleep(float(given.get("eps", 0)))
note("end")
if name + data * " data" in os.environ.get("BROKEN", "").split(","): sys.exit(1)
if not data:
    folder, settings = json.loads((place / "runs.json").read_text())[name]
    folder = Path(folder)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(json.dumps(settings))
    about = dict(accuracy=0.5, pretrain=None, baselines={}, steps=1, planned_steps=1, seconds=1)
    about |= dict(ms_per_step=1, scale="small", complete=True)
    (folder / "part").write_text(json.dumps(about))
    os.replace(folder / "part", folder / "result.json")  # others look for it meanwhile
"""


def notes(place: Path) -> list[dict]:
    path = place / "notes"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def events(place: Path) -> list[str]:
    return [f"{x['run']} {x['event']}" for x in notes(place)]


def wait(ready: Callable[[], bool], process: subprocess.Popen[str] | None = None) -> None:
    """Returns when something is there. `process` must not have ended before."""
    end = time.monotonic() + 1200
    while not ready():
        assert time.monotonic() < end and (process is None or process.poll() is None)
        time.sleep(0.01)


def limit(queue: Queue, ready: Callable[[], bool]) -> None:
    """Lets the time of a queue be over when something is there."""

    def end() -> None:
        wait(ready)
        queue.minutes = 1e-9

    threading.Thread(target=end).start()
