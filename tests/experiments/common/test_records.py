"""The CSV of measurements: typed round trip, partial lines, and what counts as measured already."""

import fcntl
import gzip
import multiprocessing
import os
from dataclasses import dataclass, replace

import pytest

from experiments.bench.rows import SpeedRow
from experiments.common import records as records_module
from experiments.common.records import Records, Row, as_csv, columns, last_versions, read
from tests.experiments.bench.bench_cases import ORIGIN, ROW


@dataclass(frozen=True, kw_only=True)
class Small(Row):
    """One field of each type."""

    name: str
    count: int
    share: float | None = None
    done: bool
    late: bool | None = None

    WHAT = ("name", "count")


SMALL = Small(name="a", count=3, done=False, mask="", density=None, **ORIGIN)


def speed(path, **options):
    return Records(path, SpeedRow, **options)


def test_rows_come_back_as_they_were_written(tmp_path):
    records = speed(tmp_path / "new" / "speed.csv")
    rows = [ROW, replace(ROW, direction="backward", ms_median=None, error=None, status="failed: x")]
    for row in rows:
        records.append(row)
    assert read(records.path, SpeedRow) == rows
    assert speed(records.path).rows == rows


@pytest.mark.parametrize("row", [SMALL, replace(SMALL, share=0.123456, done=True, late=False)])
def test_every_type_comes_back(tmp_path, row):
    Records(tmp_path / "small.csv", Small).append(row)
    assert read(tmp_path / "small.csv", Small) == [row]
    assert (tmp_path / "small.csv").read_text() == as_csv([row], Small)


def test_a_kinds_own_columns_come_first_and_the_origin_last():
    found = columns(Small)
    assert found[:5] == ("name", "count", "share", "done", "late")
    assert found[5:] == ("mask", "density", *ORIGIN)


def test_a_status_of_several_lines_stays_one_row(tmp_path):
    records = speed(tmp_path / "speed.csv")
    records.append(replace(ROW, status="failed: first\nsecond"))
    assert [row.status for row in read(records.path, SpeedRow)] == ["failed: first second"]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_partial_last_row_is_cut_off_and_the_others_stay(tmp_path, kept):
    records = speed(tmp_path / "speed.csv")
    records.append(ROW)
    whole = records.path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    records.path.write_bytes(whole + last[:kept])
    assert read(records.path, SpeedRow) == [ROW]
    again = speed(records.path)
    assert records.path.read_bytes() == whole
    again.append(replace(ROW, n_q=512))
    assert [row.n_q for row in read(records.path, SpeedRow)] == [256, 512]


@pytest.mark.parametrize("content", ["", "mask,prov"])
def test_a_file_killed_before_its_header_was_whole_starts_again(tmp_path, content):
    path = tmp_path / "speed.csv"
    path.write_text(content)
    assert speed(path).rows == []
    assert path.read_text() == ",".join(columns(SpeedRow)) + "\n"


def test_other_columns_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "speed.csv"
    path.write_text("mask,ms\na,1\n")
    with pytest.raises(ValueError, match=r"speed\.csv has other columns.*csv=PATH"):
        speed(path)
    assert path.read_text() == "mask,ms\na,1\n"


def test_rows_of_before_an_optional_column_are_read_and_not_added_to(tmp_path):
    path = tmp_path / "speed.csv"
    speed(path).append(ROW)
    lines = [line.split(",") for line in path.read_text().splitlines()]
    place = lines[0].index("calls")
    path.write_text("".join(",".join(x[:place] + x[place + 1 :]) + "\n" for x in lines))
    (row,) = read(path, SpeedRow)
    assert row.calls is None and row.ms == pytest.approx(ROW.ms)
    with pytest.raises(ValueError, match=r"other columns than this version writes \(calls\)"):
        speed(path)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("a,3,", "a,three,", r"small\.csv, line 3: count='three' must be of type int; correct or"),
        ("a,3,", "a,,", r"line 3: count='' must be of type int"),
        ("False", "no", r"line 3: done='no' must be of type bool"),
        ("a,3,", "a,", r"line 3: 13 cells instead of 14; correct or delete that line"),
        ("a,3,", "a,3,,", r"line 3: 15 cells instead of 14"),
        ("a,3,", '"a,3,', r"line 3: unexpected end of data"),
    ],
)
def test_a_damaged_row_is_named_with_file_line_and_remedy(tmp_path, old, new, message):
    path = tmp_path / "small.csv"
    path.write_text(as_csv([SMALL, SMALL], Small))
    first, second, third = path.read_text().splitlines(keepends=True)
    path.write_text(first + second + third.replace(old, new, 1))
    for use in (lambda: read(path, Small), lambda: Records(path, Small)):
        with pytest.raises(ValueError, match=message):
            use()


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(ValueError, match=r"none\.csv cannot be read .*experiments\.speed"):
        read(tmp_path / "none.csv", SpeedRow)
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\n")
    with pytest.raises(ValueError, match=r"binary\.csv cannot be read .*utf-8"):
        read(tmp_path / "binary.csv", SpeedRow)


def test_a_compressed_file_is_read_and_not_added_to(tmp_path):
    plain = tmp_path / "rows.csv"
    plain.write_text(as_csv([ROW], SpeedRow))
    packed = tmp_path / "rows.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read(packed, SpeedRow) == [ROW]
    with pytest.raises(ValueError, match=r"rows.csv.gz is compressed.*gunzip it first"):
        Records(packed, SpeedRow)
    whole = packed.read_bytes()
    packed.write_bytes(whole[:20] + b"x" * 20 + whole[40:])
    with pytest.raises(ValueError, match=r"rows.csv.gz cannot be read \(Error -3 while decompr"):
        read(packed, SpeedRow)
    packed.write_bytes(whole[:20])
    with pytest.raises(ValueError, match=r"rows.csv.gz cannot be read \(Compressed file ended"):
        read(packed, SpeedRow)


def test_only_what_a_commit_has_is_published(tmp_path, monkeypatch):
    def refuse(path):
        raise ValueError(f"{path}: commit first")

    monkeypatch.setattr(records_module.provenance, "check_published", refuse)
    with pytest.raises(ValueError, match=r"speed\.csv: commit first"):
        speed(tmp_path / "speed.csv")
    assert list(tmp_path.iterdir()) == []
    speed(tmp_path / "speed.csv", allow_changes=True).append(ROW)


def test_fresh_takes_the_next_free_name(tmp_path):
    speed(tmp_path / "speed.csv").append(ROW)
    names = [speed(tmp_path / "speed.csv", fresh=True).path.name for _ in range(2)]
    assert names == ["speed-2.csv", "speed-3.csv"]
    assert read(tmp_path / "speed.csv", SpeedRow) == [ROW]


def test_the_newest_row_of_the_same_measurement_is_found(tmp_path):
    """Whatever came out of it; our own providers are measured again when the source changes."""
    records = speed(tmp_path / "speed.csv")
    newer = replace(ROW, ms_median=9.0, date="2027-01-01", command="other")
    peer = replace(ROW, provider="sdpa")
    for row in (ROW, newer, peer):
        records.append(row)
    assert records.find(replace(ROW, ms_median=None, commit="123")) == newer
    assert records.find(replace(peer, source="def")) == peer
    small = Records(tmp_path / "small.csv", Small)
    small.append(SMALL)
    assert small.find(SMALL) == SMALL and small.find(replace(SMALL, source="def")) is None
    other = {"device": "another", "torch": "3.0", "source": "def", "n_k": 512, "block_q": 64}
    for name, value in (other | {"v_dim": 8, "mask": "causal()"}).items():
        assert records.find(replace(ROW, **{name: value})) is None, name


def test_all_rounds_of_the_last_versions_stay_and_none_of_earlier_ones():
    old = [replace(ROW, round=n, source="old") for n in (1, 2, 3)]
    new, other = [replace(ROW, round=n) for n in (1, 2)], replace(ROW, n_k=512, source="old")
    assert last_versions([*old, other, *new]) == [other, *new]


def write_rows(path, name, count):
    for i in range(count):
        rows = Records(path, Small)  # as run_plan does: it cuts off lines without an end
        rows.append(replace(SMALL, name=name, count=i))


def test_several_processes_write_to_one_file(tmp_path):
    """Seeds of a plan run side by side on several GPUs."""
    path, count, names = tmp_path / "small.csv", 75, "abcd"
    fork = multiprocessing.get_context("fork")  # a new interpreter would import torch
    writers = [fork.Process(target=write_rows, args=(path, name, count)) for name in names]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join(60)
    assert [writer.exitcode for writer in writers] == [0] * len(names)
    rows = read(path, Small)
    assert sorted((row.name, row.count) for row in rows) == [
        (name, i) for name in names for i in range(count)
    ]


def test_a_file_begins_while_no_other_process_writes(tmp_path, monkeypatch):
    events, lock = [], fcntl.flock
    monkeypatch.setattr(records_module.fcntl, "flock", lambda *a: events.append("lock") or lock(*a))
    cut = os.truncate
    monkeypatch.setattr(records_module.os, "truncate", lambda *a: events.append("cut") or cut(*a))
    Records(tmp_path / "small.csv", Small).append(SMALL)
    assert events == ["lock", "cut", "lock"]
