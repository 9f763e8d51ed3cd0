"""Compiles calls with several Tritons, each in a process of its own, and keeps the rows."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.bench.compile_matrix.calls import Call
from experiments.bench.compile_matrix.rows import CompileRow
from experiments.common.progress import progress
from experiments.common.provenance import ROOT, versions
from experiments.common.records import OK, Records

CHILD = "experiments.bench.compile_matrix.child"


def compile_rows(
    version: str, folder: Path | None, target: str, calls: Sequence[Call], command: str,
    known: Sequence[str] = (),
) -> Iterator[list[CompileRow]]:  # fmt: skip
    """The rows of each call, compiled now; folder: where this Triton is, None if it is installed.

    Variants that are known are not compiled, and a variant of several calls is one row.
    """
    origin = CompileRow.origin("cpu", command) | {"triton": version}
    path = filter(None, (str(folder or ""), str(ROOT), os.environ.get("PYTHONPATH")))
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    request = {"target": target, "calls": [asdict(call) for call in calls], "known": list(known)}
    with tempfile.TemporaryDirectory() as caches, tempfile.TemporaryFile("w+") as errors:
        child = subprocess.Popen(
            [sys.executable, "-m", CHILD], cwd=ROOT, text=True, stdin=subprocess.PIPE,
            stdout=subprocess.PIPE, stderr=errors,
            env=environment | {"PYTHONPATH": os.pathsep.join(path), "TRITON_CACHE_DIR": caches},
        )  # fmt: skip
        assert child.stdin is not None and child.stdout is not None
        with child:
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            rows: list[CompileRow] = []
            for line in child.stdout:
                made: dict[str, Any] = json.loads(line)
                if "done" in made:
                    yield rows
                    rows = []
                else:
                    fields = {"status": OK, "mask": "", "density": None, "target": target} | made
                    rows.append(CompileRow(**origin, **fields))
        if child.returncode:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"the compilation with Triton {version} ended early: {last[:300]}")


def run(
    version: str, folder: Path | None, target: str, calls: Sequence[Call],
    records: Records[CompileRow], command: str,
) -> list[CompileRow]:  # fmt: skip
    """The rows of a Triton and a target, compiled now or found in `records`."""
    source = CompileRow.origin("cpu", command)["source"]
    same = (version, target, source)

    def mine() -> list[CompileRow]:
        backends = {call.backend for call in calls}
        found = [r for r in records.rows if (r.triton, r.target, r.source) == same]
        return [row for row in found if row.status == OK and row.backend in backends]

    known = [row.variant for row in mine()]
    made = compile_rows(version, folder, target, calls, command, known)
    failed = []
    for rows in progress(made, len(calls), f"Triton {version}, {target}"):
        for row in rows:
            records.append(row)
            failed += [] if row.status == OK else [row]
    return mine() + failed


def folder_of(version: str, cache: Path) -> Path | None:
    """Where a Triton is unpacked, from PyPI if need be; None: it is the installed one.

    Raises ValueError where pip cannot get it.
    """
    if version == versions()["triton"]:
        return None
    place = cache / f"triton-{version}"
    if not place.exists():
        print(f"unpacking Triton {version} into {place}", file=sys.stderr, flush=True)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as new:
            words = ["install", "--quiet", "--no-deps", "--target", f"{new}/site"]
            done = subprocess.run(
                [sys.executable, "-m", "pip", *words, f"triton=={version}"],
                capture_output=True, text=True,
            )  # fmt: skip
            if done.returncode:
                last = (done.stderr.strip().splitlines() or ["no message"])[-1]
                raise ValueError(f"tritons={version}: pip cannot install it: {last}")
            Path(new, "site").rename(place)
    return place
