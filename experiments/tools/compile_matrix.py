"""Compile the kernels in use with every supported Triton, for GPUs that need not be there.

    python -m experiments.tools.compile_matrix
    python -m ... --tritons 3.9.0 --targets sm_90a --calls "head dim 128"
    python -m ... --no-measure --rows docs/results/cpu/compile_matrix.jsonl.gz

A row for each variant: registers, spills, shared memory, serialised wgmma. What the file of rows
holds is not compiled again. Exit status 1 where a kernel does not compile or is beyond its limits.
"""

import argparse
import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.common.provenance import ROOT, versions
from experiments.common.rows import OK, Found, Rows, found, frame, read
from experiments.common.tables import markdown, pivot
from experiments.tools.calls import CALLS, Call, calls
from experiments.tools.offline import CHIPS, HOPPER, compiled

TRITONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
MEASURED = "3.6."  # the Triton that the speed of the Hopper kernels was measured with
KEY = ("target", "backend", "label", "kernel", "variant")
FOLDER = Path("runs/compile_matrix")  # Tritons that are not installed are unpacked here


def main() -> None:
    """Compile what the command line asks for; print tables and what is beyond the limits."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--rows", default=str(FOLDER / "compile_matrix.jsonl"))
    parser.add_argument("--tritons", nargs="+", default=TRITONS)
    parser.add_argument("--targets", nargs="+", default=[*CHIPS], choices=[*CHIPS])
    parser.add_argument(
        "--calls", default="", help='only calls with this text in "backend name, head dim N"'
    )
    parser.add_argument("--no-measure", action="store_true", help="tables only, of all rows")
    parser.add_argument("--allow-changes", action="store_true")
    parser.add_argument("--here", action="store_true", help="in this process, with its Triton")
    options = parser.parse_args()
    if options.here:
        return compile_here(options)
    if not options.no_measure:
        for version in options.tritons:
            for target in options.targets:  # Triton's functions keep the options of the first
                compile_with(version, target)
    rows = found(read(options.rows))
    if not options.no_measure:
        last = rows[-1].source
        rows = [r for r in rows if r.source == last and r.triton in options.tritons
                and r.target in options.targets]  # fmt: skip
    for name, table in tables(rows).items():
        print(f"{name}\n\n{table}\n")
    beyond = [
        f"Triton {r.triton}, {r.target} {r.backend} {r.kernel}: {r.label}: {fault}"
        for r in rows
        for fault in faults(r)
    ]
    print("\n".join(beyond))
    sys.exit(bool(beyond))


def compile_with(version: str, target: str) -> None:
    """Run this command for one Triton and target, in a process that finds this Triton."""
    path = filter(None, (folder_of(version), str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    words = [*sys.argv[1:], "--here", "--targets", target]
    with tempfile.TemporaryDirectory() as caches:
        environment |= {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": caches}
        command = [sys.executable, "-m", "experiments.tools.compile_matrix", *words]
        subprocess.run(command, env=environment, check=True)


def compile_here(options: argparse.Namespace) -> None:
    """Add the rows of each call, but for variants that the file holds."""
    rows, (target,) = Rows(options.rows, KEY, allow_changes=options.allow_changes), options.targets
    command = shlex.join(["python", "-m", "experiments.tools.compile_matrix", *sys.argv[1:]])
    origin = rows.origin("cpu", command)
    same = (OK, target, origin["triton"], origin["source"])
    names = ("status", "target", "triton", "source")
    known = {r["variant"] for r in rows.rows if tuple(r[name] for name in names) == same}
    asked = wanted(target, options.calls)
    for call in tqdm(asked, f"Triton {origin['triton']}, {target}", disable=None):
        about = {"status": OK, "target": target, "label": call.label, "backend": call.backend}
        try:
            made = compiled(call, CHIPS[target], known)
            lines = [{"kernel": k.name, "variant": k.variant, **k.report()} for k in made]
        except Exception as error:  # one call that does not compile must not end the others
            reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
            lines = [{"kernel": "", "variant": "", "status": f"failed: {reason[-300:]}"}]
        for line in lines:
            rows.append(about | line | origin)
            known.add(line["variant"])


def wanted(target: str, text: str = "") -> list[Call]:
    """Return the calls for a target with this text: all for Hopper, elsewhere the portable ones."""
    backends = [name for name in CALLS if target == HOPPER or name != "hopper"]
    return [call for call in calls(*backends) if text in f"{call.backend} {call.label}"]


def faults(row: Found) -> list[str]:
    """Return what a kernel was not to do."""
    if row.status != OK:
        return [str(row.status)]
    limits = {  # bytes that a 16-bit kernel may spill: what today's do, rounded up
        "triton": 2048 if row.target == HOPPER else 256,
        "decode": 640,
    }
    spills = limits.get(row.backend, 320 if row.triton.startswith(MEASURED) else 704)
    shared = CHIPS[row.target].shared_bytes
    tests = {
        "its wgmma are serialised": row.serialized,
        f"{row.idle_barriers} barriers lie in memory that is handed out again": row.idle_barriers,
        f"it takes {row.shared_bytes} bytes of shared memory, above {shared}": (
            (row.shared_bytes or 0) > shared
        ),
        f"it spills {row.spilled_bytes} bytes, above {spills}": (
            (row.spilled_bytes or 0) > spills and "float32" not in row.label
        ),
    }
    return [fault for fault, true in tests.items() if true]


def folder_of(version: str) -> str | None:
    """Return where a Triton is unpacked, from PyPI if need be; None: it is the installed one."""
    if version == versions()["triton"]:
        return None
    place = FOLDER / f"triton-{version}"
    if not place.exists():
        FOLDER.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=FOLDER) as new:
            words = ["install", "--quiet", "--no-deps", "--target", f"{new}/site"]
            subprocess.run([sys.executable, "-m", "pip", *words, f"triton=={version}"], check=True)
            Path(new, "site").rename(place)
    return str(place.resolve())


# ---- tables


def tables(rows: Any) -> dict[str, str]:
    """Return a line for each GPU and backend as Markdown; float32 apart, for the limit on spills is
    for 16 bits.

    Each cell: most registers of a thread / most spilled bytes of a variant (stores and loads);
    n serialised: variants whose wgmma wait for one another.
    """
    lacks = {"registers": 0, "spilled_bytes": 0, "serialized": False}  # where none compiled
    every = frame([lacks | row for row in rows])
    every = every.sort_values(["target", "backend", "triton"], kind="stable")
    kind = every.label.str.contains("float32").map({True: "float32", False: "16 bits"})
    table = pivot(every.assign(kind=kind), ["target", "backend", "kind"], "triton", _worst)
    return {"gpus": markdown(table, left=(0, 1, 2))}


def _worst(rows: Any) -> str:
    registers, spilled = (int(rows[n].fillna(0).max()) for n in ("registers", "spilled_bytes"))
    serialized, failed = int((rows.serialized == True).sum()), int((rows.status != OK).sum())  # noqa: E712
    notes = f", {serialized} serialised" if serialized else ""
    return f"{registers} / {spilled}{notes}" + (f", {failed} failed" if failed else "")


if __name__ == "__main__":
    main()
