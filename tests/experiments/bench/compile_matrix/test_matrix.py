"""The compile matrix but for the compilers: rows, limits, tables, Tritons, and what is resumed."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from experiments import compile_matrix
from experiments.bench.compile_matrix import calls, run
from experiments.bench.compile_matrix.rows import CompileRow
from experiments.bench.compile_matrix.table import tables
from experiments.common.records import OK, read

ROW = CompileRow(
    target="sm_90a", backend="hopper", label="causal, head dim 64", kernel="backward_cols",
    variant="a1", status=OK, registers=168, spilled_bytes=0, shared_bytes=1000, wgmma=96,
    serialized=False, idle_barriers=0, mask="", density=None, device="", torch="", triton="3.6.0",
    source="", commit="", date="", command="",
)  # fmt: skip


@pytest.mark.parametrize(
    "change, fault",
    [
        ({}, None),
        ({"status": "failed: no such name"}, "failed: no such name"),
        ({"serialized": True}, "serialised"),
        ({"idle_barriers": 2}, "2 barriers lie in memory"),
        ({"shared_bytes": 227 * 1024 + 1}, "shared memory, above 232448"),
        ({"target": "gfx942", "shared_bytes": 65537}, "above 65536"),
        ({"spilled_bytes": 5000}, "spills 5000 bytes"),
        ({"spilled_bytes": 5000, "label": "causal, float32, head dim 128"}, None),
    ],
)
def test_faults(change, fault):
    faults = replace(ROW, **change).faults()
    assert faults == [] if fault is None else fault in " ".join(faults)


def test_barriers_that_no_warps_use_are_found():
    offline = pytest.importorskip("experiments.bench.compile_matrix.offline")
    text = """
  %full = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared>
  %idle = ttg.local_alloc : () -> !ttg.memdesc<2x1xi64, #shared>
  %idle2 = ttg.local_alloc : () -> !ttg.memdesc<1xi64, #shared>
  ttng.init_barrier %idle, 1
  ttg.warp_specialize(%q, %full)
  default { use %q }
  partition0(%a) { }
"""
    assert offline.idle_barriers(text) == ["%idle", "%idle2"]
    assert offline.idle_barriers(text.split("ttg.warp_specialize")[0]) == []


def test_every_call_has_a_name_of_its_own():
    made = [*calls.hopper_calls(), *calls.portable_calls()]
    names = [(call.backend, call.label) for call in made]
    assert len(set(names)) == len(names) > 60


def test_tables():
    rows = [
        ROW,
        replace(ROW, triton="3.9.0", spilled_bytes=120),
        replace(ROW, triton="3.9.0", kernel="attention_forward", serialized=True),
    ]
    text = tables(rows)
    assert "| sm_90a | hopper | backward_cols | 1 | 1 | 168 / 0 | 168 / 120 |" in text
    assert "| sm_90a | hopper | 2 | 1 | 227 | 168 / 0 | 168 / 120, 1 serialised |" in text
    assert "168 / 0, 1 serialised" in text and "| 0 | 120 |" in text
    assert "attention_forward: causal, head dim 64, Triton 3.9.0: its wgmma are serialised" in text
    assert "Beyond" not in tables(rows[:2])
    exact = replace(ROW, backend="triton", label="causal, float32, head dim 64", status="failed: x")
    assert "| sm_90a | triton, float32 | 1 | 1 | 227 | 168 / 0, 1 failed |" in tables([exact])


CHILD = """
import json, sys
request = json.load(sys.stdin)
for call in request["calls"]:
    name = call["name"] + str(call["head_dim"])
    if name not in request["known"]:
        kernel = {"kernel": "k", "variant": name, "label": name, "backend": call["backend"]}
        print(json.dumps(kernel | FOUND))
    print(json.dumps({"done": name}))
    if ENDS:
        sys.exit("killed")
"""


@pytest.fixture
def compiled(monkeypatch, tmp_path):
    """Runs the program with a stand-in for the process that compiles: (exit status, rows)."""
    popen = subprocess.Popen

    def start(found: dict, ends: bool, *words: str):
        code = CHILD.replace("FOUND", repr(found)).replace("ENDS", str(ends))
        monkeypatch.setattr(
            run.subprocess,
            "Popen",
            lambda _, **options: popen([sys.executable, "-c", code], **options),
        )
        installed = run.versions()["triton"]
        words = (f"csv={tmp_path}/r.csv", f"tritons=[{installed}]", "targets=[sm_80]", *words)
        monkeypatch.setattr(sys, "argv", ["compile_matrix", *words])
        status = 0
        try:
            compile_matrix.main()
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, read(tmp_path / "r.csv", CompileRow)

    return start


def test_a_rerun_compiles_only_what_is_missing(compiled, tmp_path, capsys):
    status, rows = compiled({"spilled_bytes": 8, "shared_bytes": 64}, True)
    assert status == 2 and len(rows) == 1  # the process ended after its first call
    assert "ended early: killed" in capsys.readouterr().err
    status, rows = compiled({"spilled_bytes": 0, "shared_bytes": 64}, False)
    assert status == 0 and len(rows) == len(calls.portable_calls())
    assert len({row.variant for row in rows}) == len(rows) and rows[0].spilled_bytes == 8
    assert rows == compiled({}, False)[1]
    assert "sm_80" in (tmp_path / "r.md").read_text()


def test_a_page_has_its_tables_filled(compiled, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("Text.\n<!-- rows: gpus -->\n<!-- end -->\n")
    compiled({"registers": 9, "spilled_bytes": 8, "shared_bytes": 1024}, False, f"page={page}")
    assert "| sm_80 | triton, 16 bits |" in page.read_text() and "| 9 / 8 |" in page.read_text()
    assert not (tmp_path / "r.md").exists()
    written = page.read_text()
    page.write_text(written.replace("9 / 8", ""))
    status, _ = compiled({}, True, "measure=false", f"page={page}")  # the process would be killed
    assert status == 0
    assert page.read_text() == written


def test_a_fault_is_told_and_is_the_exit_status(compiled, capsys):
    status, rows = compiled({"spilled_bytes": 9000, "shared_bytes": 1}, False, "calls=head dim 256")
    told = capsys.readouterr().out
    assert status == 1 and f"sm_80, k (triton, {rows[0].label}): it spills 9000 bytes" in told


def test_calls_that_failed_are_compiled_again(compiled):
    words = "calls=float16"
    status, rows = compiled({"status": "failed: no register"}, False, words)
    assert status == 1 and rows[0].status == "failed: no register"
    status, rows = compiled({"shared_bytes": 1}, False, words)
    assert status == 0 and rows[-1].status == OK


def test_tritons_are_unpacked_once(monkeypatch, tmp_path):
    commands = []

    def pip(command, **options):
        commands.append(command)
        place = Path(command[command.index("--target") + 1])
        if "triton==3.7.1" in command:
            place.mkdir()
            return SimpleNamespace(returncode=0, stderr="")
        return SimpleNamespace(returncode=1, stderr="x\nERROR: no matching distribution\n")

    monkeypatch.setattr(run.subprocess, "run", pip)
    monkeypatch.setattr(run, "versions", lambda: {"triton": "3.9.0"})
    assert run.folder_of("3.9.0", tmp_path) is None
    for _ in range(2):
        assert run.folder_of("3.7.1", tmp_path) == tmp_path / "triton-3.7.1"
    assert len(commands) == 1
    with pytest.raises(ValueError, match=r"tritons=9\.9: pip cannot .*no matching distribution"):
        run.folder_of("9.9", tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["triton-3.7.1"]


def test_a_text_that_no_call_has_is_refused(compiled, capsys):
    found = {"spilled_bytes": 0, "shared_bytes": 64}
    assert compiled(found, False, "calls=bias")[0] == 0
    status, _ = compiled(found, False, "calls=[bias]")
    assert status == 2 and "calls is \"['bias']\", which no call has" in capsys.readouterr().err
    for name in ("targets", "tritons"):
        status, _ = compiled(found, False, f"{name}=[]")
        assert status == 2 and f"{name}=[]: give at least one" in capsys.readouterr().err
