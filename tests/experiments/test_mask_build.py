"""Measuring how block masks are made: the rows, the refusals, and the program from end to end."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import masks
from experiments import mask_build
from experiments.bench import build_case
from experiments.bench.rows import BuildRow
from experiments.common.records import OK, read
from experiments.mask_build import measure, table, verdict

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
ORIGIN = dict.fromkeys("device torch triton source commit date command".split(), "x")
ROW = BuildRow(mask="local:256", builder="masks", seq_len=4096, block=128, density=None, **ORIGIN)
OPTIONS = {"seconds": 0.01, "limit_s": 60, "limit_gib": None}


def test_a_measurement():
    row = measure(ROW, CPU, OPTIONS)
    blocks = masks.local(256).build(4096)
    assert row.status == OK and row.nnz == blocks.nnz
    assert (row.runs, row.tiles) == (len(blocks.starts), len(blocks.bits))
    assert 0 < row.ms_p20 <= row.ms_median <= row.ms_p80
    # Of a process without torch, whatever this one has loaded.
    assert 0 < row.import_mib <= row.peak_mib < 150


@pytest.mark.parametrize("builder", ["flex", "schedule", "where"])
def test_peers_find_as_many_blocks(builder: str):
    row = measure(replace(ROW, builder=builder, seq_len=1024), CPU, OPTIONS)
    assert row.status == OK and row.nnz == masks.local(256).build(1024).nnz
    wrong = verdict(row, replace(row, nnz=row.nnz + 1))
    assert wrong.status.startswith("wrong result") and verdict(row, row) == row


def test_refusals():
    flex = replace(ROW, builder="flex")
    long = measure(replace(flex, seq_len=1 << 20), CPU, OPTIONS)
    assert long.status == "unsupported: about 24576 GiB for all pairs"
    drawn = measure(replace(flex, mask="random:0.1"), CPU, OPTIONS)
    assert drawn.status.startswith("unsupported: no formula for random:0.1")
    wrong = measure(replace(ROW, mask="nothing:1"), CPU, OPTIONS)
    assert "unknown pattern 'nothing'" in wrong.status
    late = measure(flex, CPU, OPTIONS | {"limit_s": 0.01})
    assert late.status == "unsupported: more than 0.01 s"


def test_table():
    ours = replace(ROW, status=OK, ms_median=2.0, import_mib=30.0, peak_mib=31.0, nnz=7, runs=5)
    text = table([ours, replace(ROW, builder="flex", status="unsupported: too long")])
    assert "2.00 (1)" in text and "flex: unsupported: too long" in text
    assert "local:256" in text.splitlines()[2] and text.splitlines()[2].endswith("-")


def test_documents():
    lengths = build_case.documents(1 << 20)
    assert sum(lengths) == 1 << 20 and min(lengths) > 0
    assert np.mean(lengths) == pytest.approx(2000, rel=0.1)
    assert build_case.documents(1) == [1]


@pytest.mark.parametrize("name", [*build_case.FORMULAS, "documents & causal", "neighborhood"])
def test_formulas(name: str):
    """The same of arrays, of tensors, and of masks.where."""
    n = 400
    q, k = np.arange(n)[:, None], np.arange(n)[None, :]
    allowed = build_case.formula(name, n, np.asarray, np.clip)(q, k)
    rule = build_case.formula(name, n, torch.tensor, torch.clamp)
    assert np.array_equal(rule(torch.tensor(q), torch.tensor(k)).numpy(), allowed)
    for mask in (
        build_case.make(name, n),
        masks.where(build_case.formula(name, n, masks.table, np.clip)),
    ):
        assert np.array_equal(mask.build(n).to_dense()[0, 0], allowed)


def test_program(tmp_path):
    def run(*words):
        command = [sys.executable, "-m", "experiments.mask_build", f"csv={tmp_path}/m.csv"]
        words = ("seq_len=[1024,2048]", "seconds=0.01", "device=cpu", *words)
        return subprocess.run(
            [*command, *words], cwd=ROOT, capture_output=True, text=True, timeout=120
        )

    for _ in range(2):  # what there is already is not measured again
        done = run("mask=[causal,local:256]", "builders=[masks]")
        assert done.returncode == 0, done.stderr
    rows = read(tmp_path / "m.csv", BuildRow)
    assert [(row.mask, row.seq_len, row.status) for row in rows] == [
        (mask, n, OK) for mask in ("causal", "local:256") for n in (1024, 2048)
    ]
    assert "mask=[causal,local:256]" in rows[0].command and "masks ms (MiB)" in done.stdout
    wrong = run("builders=[fast]")
    assert wrong.returncode != 0 and "builders='fast': choose from masks" in wrong.stderr


def test_what_was_too_slow_is_not_tried_longer(tmp_path, monkeypatch):
    tried = []

    def slow(row, device, options):
        tried.append((row.builder, row.seq_len))
        status = OK if row.builder == "masks" else "unsupported: more than 5 s"
        return replace(row, status=status, nnz=1)

    monkeypatch.setattr(mask_build, "measure", slow)
    config = {"mask": "causal", "seq_len": [2048, 1024], "block_size": 128, "device": "cpu"}
    config |= {"builders": ["masks", "flex"], "csv": str(tmp_path / "m.csv"), "fresh": False}
    config |= {"seconds": 0.01, "limit_s": 5, "allow_changes": False}
    mask_build.measure_all(config, "")
    assert tried == [("masks", 1024), ("flex", 1024), ("masks", 2048)]
    assert [row.status for row in read(tmp_path / "m.csv", BuildRow)][
        3
    ] == "unsupported: more than 5 s"
