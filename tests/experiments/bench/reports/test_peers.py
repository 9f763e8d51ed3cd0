"""Tables beside peers: times, ratios, counts, and what has no time."""

from dataclasses import replace

import pytest

from experiments.bench.cases import DENSE
from experiments.bench.providers import PROVIDERS
from experiments.bench.reports.columns import COLUMNS
from experiments.bench.reports.peers import NAMES, against_peers, peer_counts
from experiments.bench.rows import SpeedRow
from tests.experiments.bench.bench_cases import ROW

DOCUMENTS = "documents((1, 2, 3, 4, 501)) & causal()"
BASE = replace(ROW, device="a GPU", torch="2.9", triton="3.9", date="2026-01-02T03:04:05", n_q=512)


def row(provider: str, direction: str, ms: float | None, **changes) -> SpeedRow:
    found = replace(BASE, provider=provider, direction=direction, ms_median=ms)
    return replace(found, **{"mask": DOCUMENTS, "status": "ok" if ms else "failed: no"} | changes)


ROWS = [
    row("hopper", "forward", 2.0),
    row("hopper", "backward", 40.0),
    row("fa4_varlen", "forward", 1.0, version="4.0"),
    row("fa4_varlen", "backward", 41.0, version="4.0"),
    row("cudnn_flex", "forward", 3.0),
    row("cudnn_flex", "backward", None),
    row("hopper", "forward", 4.0, mask="local(3) | global_at((1, 2))"),
    row("fa4_varlen", "forward", 9.0, mask="local(3) | global_at((1, 2))"),
    row("hopper", "forward", 1234.0, mask=DENSE, n_q=1024, kv_heads=1, layout="token_major"),
    row("sdpa_cudnn", "forward", 1234.0, mask=DENSE, n_q=1024, kv_heads=1, layout="token_major"),
    row("flex", "forward", 5.0, mask="causal()"),
]


def test_every_shape_has_a_table_of_times_and_ratios():
    about, first, table, second, other, missing = against_peers(ROWS).split("\n\n")
    assert about.startswith("One a GPU, float32, 512 to 1024 tokens. ms, and in brackets peer time")
    assert first == "2 heads of 16, 512 tokens, B, H, N, D:"
    assert table.splitlines() == [
        "| mask | density | direction | `hopper` | its varlen | its intervals | FlexAttention |",
        "| --- | ---: | --- | ---: | ---: | ---: | ---: |",
        "| `documents((...)) & causal()` | 0.25 | forward | 2 | 1 (0.50) | 3 (1.50) |  |",
        "| `documents((...)) & causal()` | 0.25 | backward | 40 | 41 (1.02) |  |  |",
        "| `local(3) \\| global_at((1, 2))` | 0.25 | forward | 4 | 9 (2.25) |  |  |",
        "| `causal()` | 0.25 | forward |  |  |  | 5 |",
    ]
    assert second == "2 query and 1 key heads of 16, 1,024 tokens, B, N, H, D:"
    assert other.splitlines()[2:] == ["| none | 0.25 | forward | 1,230 | 1,230 (1.00) |"]
    assert missing.splitlines()[2:] == [
        "| cuDNN Frontend, its intervals | backward | 1 | failed: no |"
    ]


def test_without_a_time_of_ours_there_is_nothing_to_compare_with():
    assert against_peers(ROWS[2:6]) == peer_counts(ROWS[2:6]) == peer_counts(ROWS[:2]) == ""
    assert "not measured" not in against_peers(ROWS[:2])


@pytest.mark.parametrize("name", PROVIDERS)
def test_every_provider_has_a_place(name):
    text = COLUMNS[name]
    timed, failed = row(name, "forward", 2.0), row(name, "backward", None)
    first = [row("hopper", "forward", 1.0), row("cpu", "forward", 1.0)][name == "hopper"]
    tables = against_peers([first, timed, failed])
    assert f"| {text} |" in tables and f"| {NAMES[name]} | backward | 1 | failed: no |" in tables
    assert peer_counts([first, timed]).count("\n") == (0 if timed.own else 2)


def test_a_measurement_that_is_repeated_takes_the_place_of_the_first():
    newer = [
        replace(ROWS[0], ms_median=1.0, source="y"),
        replace(ROWS[5], ms_median=80.0, status="ok"),
    ]
    text = against_peers([*ROWS, *newer])
    assert "| forward | 1 | 1 (1.00) | 3 (3.00) |" in text and "80 (2.00)" in text
    assert "not measured" not in text


def test_counts_of_faster_level_and_slower_cases():
    assert peer_counts(ROWS).splitlines()[2:] == [
        "| FlashAttention-4, its varlen | backward | 1 | 0 | 1 | 0 | 1.02 | 1.02 | 1.02 |",
        "| FlashAttention-4, its varlen | forward | 2 | 1 | 0 | 1 | 1.06 | 0.50 | 2.25 |",
        "| cuDNN Frontend, its intervals | forward | 1 | 1 | 0 | 0 | 1.50 | 1.50 | 1.50 |",
        "| cuDNN, dense | forward | 1 | 0 | 1 | 0 | 1.00 | 1.00 | 1.00 |",
    ]
