"""Measuring how block masks are made: the rows, the refusals and the table."""

import subprocess
from dataclasses import replace

import pytest

import masks
from experiments.bench.mask_build import run as mask_build
from experiments.bench.mask_build.run import measure, table, verdict
from experiments.bench.rows import BuildRow
from experiments.common.records import OK, Records, read
from tests.experiments.bench.bench_cases import CPU, ORIGIN

ROW = BuildRow(mask="local:256", builder="masks", seq_len=4096, block=128, density=None, **ORIGIN)
OPTIONS = {"seconds": 0.01, "limit_s": 60, "limit_gib": 100.0, "block_size": 128}


def test_a_measurement():
    row = measure(ROW, CPU, OPTIONS)
    blocks = masks.local(256).build(4096)
    assert row.status == OK and row.nnz == blocks.nnz
    assert row.density == blocks.density
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


def test_refusals(monkeypatch):
    flex = replace(ROW, builder="flex")
    long = measure(replace(flex, seq_len=1 << 20), CPU, OPTIONS)
    assert long.status == "unsupported: about 24576 GiB for all pairs"
    with monkeypatch.context() as without:
        without.setattr(subprocess, "run", None)  # no process is started for that
        other = measure(replace(flex, mask="local:64"), CPU, OPTIONS)
    assert other.status.startswith("unsupported: no formula for local:64, only for causal, loc")
    wrong = measure(replace(ROW, mask="nothing:1"), CPU, OPTIONS)
    assert "unknown pattern 'nothing'" in wrong.status
    late = measure(flex, CPU, OPTIONS | {"limit_s": 0.01})
    assert late.status == "unsupported: more than 0.01 s"


def test_table():
    ours = replace(ROW, status=OK, ms_median=2.0, import_mib=30.0, peak_mib=31.0, nnz=7, runs=5)
    text = table([ours, replace(ROW, builder="flex", status="unsupported: too long")])
    assert "2.00 (1)" in text and "flex: unsupported: too long" in text
    assert "local:256" in text.splitlines()[2] and text.splitlines()[2].endswith("-")


def test_what_was_too_slow_is_not_tried_longer(tmp_path, monkeypatch):
    tried = []

    def slow(row, device, options):
        tried.append((row.builder, row.seq_len))
        status = OK if row.builder == "masks" else "unsupported: more than 5 s"
        return replace(row, status=status, nnz=1)

    monkeypatch.setattr(mask_build, "measure", slow)
    records = Records(tmp_path / "m.csv", BuildRow)
    mask_build.run(["causal"], [2048, 1024], ["masks", "flex"], CPU, OPTIONS, records, "")
    assert tried == [("masks", 1024), ("flex", 1024), ("masks", 2048)]
    assert read(tmp_path / "m.csv", BuildRow)[3].status == "unsupported: more than 5 s"
