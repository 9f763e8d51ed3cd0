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

from experiments.common.files import write_whole
from experiments.lra.sweep.runs import SweepRun
from experiments.lra.training.checkpoint import CHECKPOINT, WEIGHTS
from experiments.lra.training.config import CONFIG
from experiments.lra.training.device import MIB
from experiments.lra.training.journal import JOURNAL
from experiments.lra.training.result import RESULT

# Of a run. A checkpoint needs the journal up to its step, and a result ends the run.
FILES = (CONFIG, JOURNAL, WEIGHTS, CHECKPOINT, RESULT)
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
    try:
        data = io.BytesIO(b"".join(part.read_bytes() for part in parts))
        with tarfile.open(fileobj=data, mode="r:xz") as tar:
            for member in tar:
                folder, _, name = member.name.partition("/")
                if folder == RUNS and (content := tar.extractfile(member)):
                    place, _, name = name.rpartition("/")
                    found[place][name] = content.read()
                elif folder == COMPILED and compiled and (content := tar.extractfile(member)):
                    _add_file(compiled, name, content.read())
    except (OSError, EOFError, lzma.LZMAError, tarfile.TarError) as error:
        raise ValueError(f"import={path} cannot be read: {error}") from error
    taken = sum(_take(run, found[_place(run)]) for run in runs if _place(run) in found)
    return f"imported: {path}, {taken} of its {len(found)} runs"


def _parts(path: Path) -> list[Path]:
    """The files path.00, path.01, ..., path.100, ... in order."""
    found = [part for part in path.parent.glob(f"{path.name}.*") if part.suffix[1:].isdecimal()]
    return sorted(found, key=lambda part: int(part.suffix[1:]))


def _add_file(folder: Path, name: str, content: bytes) -> None:
    """Writes a file that the folder lacks. Raises tarfile.TarError for a name outside of it."""
    path = folder / name
    if folder.resolve() not in path.resolve().parents:
        raise tarfile.TarError(f"{name} lies outside {folder}")
    if not path.exists():
        write_whole(path, lambda file: file.write(content), "compiled")


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


def _take(run: SweepRun, files: Mapping[str, bytes]) -> bool:
    """Writes the files of a run if they are further than those here; returns whether."""
    folder = run.settings.folder
    with run.claim() as claim:
        if claim is None or run.complete:
            return False
        journal = folder / JOURNAL
        complete = json.loads(files.get(RESULT, b"{}")).get("complete")
        here = _last_step(journal.read_bytes()) if journal.exists() else -1
        if not complete and _last_step(files.get(JOURNAL, b"")) <= here:
            return False
        for name in set(FILES) - files.keys():  # weights from before would stand for those there
            (folder / name).unlink(missing_ok=True)
        for name in FILES:
            if name in files:
                write_whole(folder / name, lambda file, name=name: file.write(files[name]), "runs")
    return True


def _last_step(journal: bytes) -> int:
    """The step of its last whole line; -1 without any. A killed run may leave half a line."""
    *_, last = b'{"step": -1}', *journal.split(b"\n")[:-1]
    return json.loads(last)["step"]
