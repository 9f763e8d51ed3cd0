"""Train a sweep on GPUs that are there for half an hour, and go on elsewhere.

    python -m experiments.tools.long_runs sweep=listops_long at_once=3 minutes=25 \\
        export=runs/listops.tar.xz part_mib=15
    python -m experiments.tools.long_runs sweep=listops_long at_once=3 minutes=25 \\
        import=runs/listops.tar.xz export=runs/listops.tar.xz part_mib=15

Besides the options of experiments.sweep:

    import      an export of the sweep, or a list of them; of each run the furthest counts
    export      file to write at the end: the folders of the runs, and compiled code
    part_mib    cuts the export into files of this size, EXPORT.00, EXPORT.01, ...
    weights     false leaves out the weights of complete runs that no other run starts from
    compiled    folder of compiled code that the runs share (runs/compiled)

The compiler runs the code that it finds in its folder, so import only your own exports.
"""

import json
import lzma
import os
import shutil
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments import sweep
from experiments.common.config import as_list, compose, make
from experiments.common.files import write_whole
from experiments.training import run_file
from experiments.training.state import CHECKPOINT, WEIGHTS

OWN = {"import": [], "export": None, "part_mib": None, "weights": True, "compiled": "runs/compiled"}
RUNS, COMPILED = "runs", "compiled"  # folders in an export
MIB = 2**20


def write_export(
    path: Path, runs: Sequence[sweep.Planned], compiled: Path, weights: bool, part_mib: float | None
) -> str:
    """Write an export of the runs; return what was written."""
    needed = {run.after.name for run in runs if run.after and not run.complete}
    with tempfile.TemporaryFile() as packed:
        with lzma.open(packed, "wb", preset=1) as stream:
            with tarfile.open(fileobj=stream, mode="w|") as tar:
                for run in runs:
                    done = run.complete
                    light = done and not weights and run.name not in needed
                    without = {CHECKPOINT if done else WEIGHTS} | ({WEIGHTS} if light else set())
                    if not done and not (run.settings.folder / CHECKPOINT).exists():
                        continue  # it starts from nothing elsewhere too
                    for file in sorted(run.settings.folder.glob("*.*")):
                        if file.name not in without:
                            tar.add(file, f"{RUNS}/{_place(run)}/{file.name}")
                if compiled.exists():
                    tar.add(compiled, COMPILED)
        data = memoryview(_content(packed))
    size = len(data) if part_mib is None else int(part_mib * MIB)
    chunks = [data[i : i + size] for i in range(0, len(data), size)]
    for old in [path, *path.parent.glob(f"{path.name}.[0-9]*")]:
        old.unlink(missing_ok=True)
    names = [path] if part_mib is None else [Path(f"{path}.{i:02}") for i in range(len(chunks))]
    for name, chunk in zip(names, chunks, strict=True):
        write_whole(name, lambda file, chunk=chunk: file.write(chunk), "export")
    return f"exported: {len(data) / MIB:.1f} MiB, {', '.join(map(str, names))}"


def _content(file: Any) -> bytes:
    file.seek(0)
    return file.read()


def read_export(path: Path, runs: Sequence[sweep.Planned], compiled: Path) -> str:
    """Take those runs of an export that got further there; return how many.

    Raises ValueError if the file is missing or damaged.
    """
    parts = sorted(path.parent.glob(f"{path.name}.[0-9]*"), key=lambda p: int(p.suffix[1:]))
    parts = [path] if path.exists() else parts
    if not parts:
        raise ValueError(f"import={path}: no such file, and no {path}.00")
    taken = 0
    with tempfile.TemporaryDirectory() as place, tempfile.TemporaryFile() as joined:
        for part in parts:
            with part.open("rb") as file:
                shutil.copyfileobj(file, joined)
        joined.seek(0)
        try:
            with tarfile.open(fileobj=joined, mode="r:xz") as tar:
                tar.extractall(place, filter="data")  # nothing outside of `place`
        except (tarfile.TarError, lzma.LZMAError, EOFError) as error:
            raise ValueError(f"import={path} is damaged ({error}): export it again") from error
        found = {file.parent for file in Path(place, RUNS).rglob(run_file.RUN)}
        if found and not found & {Path(place, RUNS, _place(run)) for run in runs}:
            one = min(found).relative_to(Path(place, RUNS))
            raise ValueError(
                f"import={path} holds no run of this sweep, but {one} and others: give the sweep "
                "and the overrides of the export (on a CPU scale=full too)"
            )
        for run in runs:
            there, here = Path(place, RUNS, _place(run)), run.settings.folder
            if there.exists() and progress(there) > progress(here):
                shutil.rmtree(here, ignore_errors=True)
                shutil.copytree(there, here)
                taken += 1
        if Path(place, COMPILED).exists():
            shutil.copytree(Path(place, COMPILED), compiled, dirs_exist_ok=True)
    return f"imported: {taken} runs of {path}"


def progress(folder: Path) -> tuple[bool, int]:
    """Return whether the run in a folder is complete, and the last step of its journal."""
    complete = bool((run_file.read(folder) or {}).get("complete"))
    journal = folder / run_file.JOURNAL
    lines = journal.read_bytes().split(b"\n")[:-1] if journal.exists() else []
    return complete, json.loads(lines[-1])["step"] if lines else -1


def _place(run: sweep.Planned) -> str:
    """Return the folder of a run below runs=, which may differ between machines."""
    return str(run.settings.folder.relative_to(run.settings.runs))


def main(arguments: Sequence[str]) -> int:
    own = OmegaConf.merge(OWN, OmegaConf.from_cli([a for a in arguments if a.split("=")[0] in OWN]))
    given = [a for a in arguments if a.split("=")[0] not in OWN]
    options = make(sweep.Options, compose("sweep", given))
    runs, compiled = sweep.read_sweep(options), Path(own.compiled)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(compiled.absolute() / "inductor")
    os.environ["TRITON_CACHE_DIR"] = str(compiled.absolute() / "triton")
    for path in as_list(OmegaConf.to_object(own)["import"]):  # type: ignore[call-overload]
        print(read_export(Path(path), runs, compiled), flush=True)
    failed = {}
    try:
        if not options.dry_run:
            places = sweep.places(options)
            failed = sweep.train(runs, places, options.processes, options.minutes)
    finally:
        for run in runs:
            print(f"{run.name}: {failed.get(run.name) or sweep.state(run)}")
        if own.export is not None:
            print(write_export(Path(own.export), runs, compiled, own.weights, own.part_mib))
    return bool(failed)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except ValueError as error:
        sys.exit(f"error: {error}")
