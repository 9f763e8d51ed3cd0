"""The programs for compute-sanitizer: that they compile, and that reports are counted."""

import json

import pytest
import torch

pytest.importorskip("triton")

from tests.gpu.sanitizer import __main__ as program
from tests.gpu.sanitizer import named_barrier, record, reports
from tests.gpu.test_hopper_stress import python


@pytest.fixture(scope="module")
def ptx() -> dict[str, str]:
    """Of every variant, compiled for sm_90a in a process that does not interpret."""
    done = python("-m", "tests.gpu.sanitizer.offline")
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("variant", record.VARIANTS)
def test_the_record_compiles(variant, ptx):
    chosen, text = record.VARIANTS[variant], ptx[f"record {variant}"]
    assert text.count("mbarrier.init") == (6 if chosen["RELAY"] else 4)
    if not chosen["RELAY"]:  # the writer's code is the last
        write_first = text.rindex("st.shared.") < text.rindex("mbarrier.try_wait")
        assert write_first == chosen["EARLY"]


@pytest.mark.parametrize("variant", named_barrier.VARIANTS)
def test_the_named_barrier_stands_at_an_address_for_each_partner(variant, ptx):
    chosen, text = named_barrier.VARIANTS[variant], ptx[f"barrier {variant}"]
    meetings = 2  # of a round
    assert text.count(f"{chosen['FORM']} 9, {chosen['THREADS']};") == 2 * meetings


RACES = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at backward_cols+0xbe20 in work.py:47
=========     and Read access at backward_cols+0x12d0 in work.py:42 [40 hazards]
=========     and Read access at backward_cols+0x12d0 in work.py:42 [8 hazards]
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
DIVERGENCE = """========= Barrier error detected. Divergent thread(s) in block.
=========     at backward_cols(void *, int)+0x5680
========= Warning: Detected overflow of tracked cuda::barrier structures.
========= ERROR SUMMARY: 128 errors
"""


def test_reports_are_counted_with_their_places():
    assert reports.count("racecheck", RACES) == 2
    assert reports.places(RACES)["backward_cols work.py:42"] == 2
    assert not reports.remarks(RACES)
    assert reports.count("synccheck", DIVERGENCE) == 128
    assert reports.places(DIVERGENCE) == {"backward_cols +0x5680": 1}
    assert "--barriers" in reports.remarks(DIVERGENCE)[0]
    assert reports.count("memcheck", "") is None


FAKE = """#!/bin/sh
while [ "$1" != --log-file ]; do shift; done
printf '========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n' > "$2"
"""


def test_the_table_names_what_a_tool_should_have_reported(tmp_path, capsys, monkeypatch):
    fake = tmp_path / "compute-sanitizer"
    fake.write_text(FAKE)
    fake.chmod(0o755)
    monkeypatch.setattr(program, "_python", lambda name: ["true"])
    sanitizer = program.Sanitizer(str(fake), tmp_path, barriers=0, patience=9)
    faults = program.table(["racecheck"], ["record right", "record early"], sanitizer)
    assert faults == ["record early: wrong, but racecheck does not say so"]
    assert capsys.readouterr().out.splitlines()[1].split() == ["record", "right", "right", "0"]


def test_what_is_missing_is_said(tmp_path, monkeypatch):
    monkeypatch.setattr("sys.argv", ["sanitizer", "--sanitizer", str(tmp_path / "none")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="nothing was run: the Hopper kernels need a GPU"):
        program.main()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    with pytest.raises(SystemExit, match="nothing was run: there is no compute-sanitizer"):
        program.main()
