"""The CSV of measurements: typed round trip, healing, and what counts as measured already."""

from dataclasses import replace

import pytest

from experiments.common.records import FIELDS, OK, Records, Row, read

ROW = Row(
    mask="local(64) | butterfly(32)",
    provider="cpu",
    direction="forward",
    batch=1,
    heads=2,
    kv_heads=2,
    n_q=256,
    n_k=256,
    head_dim=16,
    dtype="float32",
    block_q=32,
    block_k=32,
    density=0.25,
    elements=0.125,
    status=OK,
    error=1e-6,
    ms_median=2.0,
    ms_p20=1.5,
    ms_p80=2.5,
    tflops=0.5,
    extra_mib=None,
    extra_expected_mib=1.0,
    device="some CPU, 2 threads",
    torch="2.13.0",
    triton="",
    source="abc",
    commit="",
    date="2026-01-01T00:00:00+00:00",
    command="python -m experiments.speed 'mask=\"a, b\"'",
    v_dim=16,
    layout="head_major",
    ideal_ms=1.0,
)


def test_rows_come_back_as_they_were_written(tmp_path):
    records = Records(tmp_path / "new" / "speed.csv")
    rows = [ROW, replace(ROW, direction="backward", ms_median=None, error=None, status="failed: x")]
    for row in rows:
        records.append(row)
    assert read(records.path) == rows
    assert Records(records.path).rows == rows


def test_a_status_of_several_lines_stays_one_row(tmp_path):
    records = Records(tmp_path / "speed.csv")
    records.append(replace(ROW, status="failed: first\nsecond"))
    assert [row.status for row in read(records.path)] == ["failed: first second"]


@pytest.mark.parametrize("kept", [1, 20, -1])
def test_a_half_written_last_row_is_cut_off_and_the_others_stay(tmp_path, kept):
    records = Records(tmp_path / "speed.csv")
    records.append(ROW)
    whole = records.path.read_bytes()
    last = whole.splitlines(keepends=True)[-1]
    records.path.write_bytes(whole + last[:kept])
    healed = Records(records.path)
    assert records.path.read_bytes() == whole
    healed.append(replace(ROW, n_q=512))
    assert [row.n_q for row in read(records.path)] == [256, 512]


@pytest.mark.parametrize("content", ["", "mask,prov"])
def test_a_file_killed_before_its_header_was_whole_starts_again(tmp_path, content):
    path = tmp_path / "speed.csv"
    path.write_text(content)
    assert Records(path).rows == []
    assert path.read_text() == ",".join(FIELDS) + "\n"


def test_other_columns_are_refused_and_left_alone(tmp_path):
    path = tmp_path / "speed.csv"
    path.write_text("mask,ms\na,1\n")
    with pytest.raises(ValueError, match=r"speed\.csv has other columns.*csv=PATH"):
        Records(path)
    assert path.read_text() == "mask,ms\na,1\n"


def test_a_missing_file_says_how_to_make_it(tmp_path):
    with pytest.raises(ValueError, match=r"no such file.*experiments\.speed"):
        read(tmp_path / "none.csv")


def test_fresh_takes_the_next_free_name(tmp_path):
    Records(tmp_path / "speed.csv").append(ROW)
    names = [Records(tmp_path / "speed.csv", fresh=True).path.name for _ in range(2)]
    assert names == ["speed-2.csv", "speed-3.csv"]
    assert read(tmp_path / "speed.csv") == [ROW]


def test_the_same_measurement_is_found_whatever_came_out_of_it(tmp_path):
    records = Records(tmp_path / "speed.csv")
    records.append(ROW)
    newer = replace(ROW, ms_median=9.0, date="2027-01-01", command="other")
    records.append(newer)
    assert records.find(replace(ROW, ms_median=None, commit="123"), own=True) == newer


@pytest.mark.parametrize(
    "change", [{"device": "another"}, {"torch": "3.0"}, {"n_k": 512}, {"block_q": 64}]
)
def test_another_device_version_or_shape_is_another_measurement(tmp_path, change):
    records = Records(tmp_path / "speed.csv")
    records.append(ROW)
    assert records.find(replace(ROW, **change), own=True) is None


def test_our_own_providers_are_measured_again_when_the_source_changes(tmp_path):
    records = Records(tmp_path / "speed.csv")
    records.append(ROW)
    changed = replace(ROW, source="def")
    assert records.find(changed, own=True) is None
    assert records.find(changed, own=False) == ROW


def test_an_older_file_is_read_and_given_the_columns_that_it_lacks(tmp_path):
    path = tmp_path / "speed.csv"
    Records(path).append(ROW)
    old = [line.rsplit(",", 3)[0] for line in path.read_text().splitlines()]
    path.write_text("\n".join(old) + "\n")
    assert read(path) == [replace(ROW, ideal_ms=None)]  # v_dim is head_dim
    records = Records(path)
    records.append(replace(ROW, v_dim=8, ideal_ms=2.0))
    assert path.read_text().splitlines()[0] == ",".join(FIELDS)
    assert [(row.v_dim, row.ideal_ms) for row in read(path)] == [(16, None), (8, 2.0)]
    assert records.find(replace(ROW, v_dim=8), own=True) == records.rows[1]
