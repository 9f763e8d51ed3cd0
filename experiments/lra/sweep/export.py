"""One file that takes a sweep to another machine: results, journals, checkpoints, compiled code.

The compiler runs the code that it finds in its folder, so import only what you exported.
"""

import io
import json
import lzma
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from experiments.common.files import read_tar, reading, table, write_whole
from experiments.lra.result import RESULT
from experiments.lra.sweep.runs import SweepRun
from experiments.training.device import MIB
from experiments.training.journal import JOURNAL
from experiments.training.state import CHECKPOINT, WEIGHTS

# Of a run. A checkpoint needs the journal up to its step, and a result ends the run.
FILES = (JOURNAL, WEIGHTS, CHECKPOINT, RESULT)
RUNS, COMPILED = "runs", "compiled"  # folders in the file
# fast, and finds what the compiler keeps twice
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 64 * MIB}]


def write_export(
    path: Path,
    runs: Sequence[SweepRun],
    compiled: Path | None,
    *,
    weights: bool = True,
    part_mib: float | None = None,
) -> str:
    """Writes an export of the runs; returns what is in it and how large that is.

    Args:
        compiled: a folder of compiled code that goes with them.
        weights: of complete runs; False keeps those that another run starts from.
        part_mib: the size of the files path.00, path.01, ... that replace a larger one.
    """
    packed, sizes = io.BytesIO(), Counter[str]()
    needed = {run.after.name for run in runs if run.after and not run.complete}
    with lzma.open(packed, "wb", filters=FILTERS) as stream:
        with tarfile.open(fileobj=stream, mode="w|") as tar:
            for run in runs:
                for file in _files(run, weights or run.name in needed):
                    tar.add(file, f"{RUNS}/{_place(run)}/{file.name}")
                    sizes[file.name] += file.stat().st_size
            for root in [compiled] if compiled else []:
                for file in sorted(p for p in root.rglob("*") if p.is_file()):
                    with suppress(FileNotFoundError):  # of another sweep that compiles
                        tar.add(file, f"{COMPILED}/{file.relative_to(root)}")
                        sizes["compiled code"] += file.stat().st_size
    data = packed.getvalue()
    size = len(data) if part_mib is None else max(1, int(part_mib * MIB))
    parts = [path.with_name(f"{path.name}.{i:02}") for i in range(-(-len(data) // size))]
    parts = [path] if part_mib is None else parts
    for number, part in enumerate(parts):
        chunk = data[number * size : (number + 1) * size]
        write_whole(part, lambda file, chunk=chunk: file.write(chunk), "export")
    for old in {path, *_parts(path)} - set(parts):
        old.unlink(missing_ok=True)
    inside = ", ".join(f"{name} {size / MIB:.1f}" for name, size in sizes.items())
    names = f"{parts[0]}" + (f" to {parts[-1].name}" if parts[1:] else "")
    return f"exported: {names}, {len(data) / MIB:.1f} MiB compressed ({inside})"


def read_export(path: Path, runs: Sequence[SweepRun], compiled: Path | None) -> str:
    """Takes those runs of an export that got further there; returns how many.

    Runs that are complete here, or at work, stay as they are.

    Raises:
        ValueError: the file is missing or cannot be read.
    """
    parts = [path] if path.exists() else _parts(path)
    if not parts:
        raise ValueError(f"import={path}: no such file; export=FILE writes one")
    found: dict[str, dict[str, bytes]] = defaultdict(dict)
    code: dict[str, bytes] = {}
    with reading(f"import={path}", "export it again"):
        data = io.BytesIO(b"".join(part.read_bytes() for part in parts))
        for member, content in read_tar(data, lambda name: name.startswith((RUNS, COMPILED))):
            folder, _, name = member.partition("/")
            if folder == RUNS:
                place, _, name = name.rpartition("/")
                found[place][name] = content
            elif folder == COMPILED and compiled:
                if not (compiled / name).resolve().is_relative_to(compiled.resolve()):
                    raise ValueError(f"{name} lies outside {compiled}")
                code |= {} if (compiled / name).exists() else {name: content}
        ends = {place: _end(files) for place, files in found.items()}
    for name, content in code.items():
        path = Path(str(compiled), name)
        write_whole(path, lambda file, content=content: file.write(content), "compiled")
    places = {_place(run): run for run in runs}
    taken = sum(_take(run, found[at], *ends[at]) for at, run in places.items() if at in found)
    return f"imported: {path}, {taken} of its {len(found)} runs"


def _parts(path: Path) -> list[Path]:
    """The files path.00, path.01, ..., path.100, ... in order."""
    found = [part for part in path.parent.glob(f"{path.name}.*") if part.suffix[1:].isdecimal()]
    return sorted(found, key=lambda part: int(part.suffix[1:]))


def _place(run: SweepRun) -> str:
    """The folder of a run below runs=, which may differ between machines."""
    return str(run.settings.folder.relative_to(run.settings.runs))


def _files(run: SweepRun, weights: bool) -> Iterator[Path]:
    """The files with which a run goes on, in the order in which they are read.

    Nothing of a run that has neither a checkpoint nor a result.
    """
    complete, folder = run.complete, run.settings.folder
    if complete or (folder / CHECKPOINT).exists():
        left_out = {CHECKPOINT if complete else WEIGHTS, *([] if weights else [WEIGHTS])}
        for name in reversed(FILES):  # a journal at work goes beyond the checkpoint before it
            if name not in left_out and (folder / name).exists():
                yield folder / name


def _take(run: SweepRun, files: Mapping[str, bytes], complete: bool, step: int) -> bool:
    """Writes the files of a run if they are further than those here; returns whether."""
    folder = run.settings.folder
    with run.claim() as claim:
        if claim is None or run.complete:
            return False
        journal = folder / JOURNAL
        with reading(journal, "delete it to start over"):
            here = _last_step(journal.read_bytes()) if journal.exists() else -1
        if not complete and step <= here:
            return False
        for name in set(FILES) - files.keys():  # weights from before would stand for those there
            (folder / name).unlink(missing_ok=True)
        for name in FILES:
            if name in files:
                write_whole(folder / name, lambda file, name=name: file.write(files[name]), "runs")
    return True


def _end(files: Mapping[str, bytes]) -> tuple[bool, int]:
    """Whether a run is complete, and the last step of its journal."""
    result = table(json.loads(files.get(RESULT, b"{}")))
    return bool(result.get("complete")), _last_step(files.get(JOURNAL, b""))


def _last_step(journal: bytes) -> int:
    """The step of its last whole line; -1 without any. A killed run may leave half a line."""
    *_, last = b'{"step": -1}', *journal.split(b"\n")[:-1]
    return int(table(json.loads(last))["step"])
