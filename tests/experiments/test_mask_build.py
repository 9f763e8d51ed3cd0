"""The program mask_build from end to end."""

from experiments.bench.rows import BuildRow
from experiments.common.records import OK, read


def test_program(tmp_path, run_program, one_thread):
    words = f"csv={tmp_path}/m.csv seq_len=[1024,2048] seconds=0.01 device=cpu builders=[masks]"
    for _ in range(2):  # what there is already is not measured again
        status, printed, _ = run_program("mask_build", *words.split(), "mask=[causal,local:256]")
        assert status == 0 and "masks ms (MiB)" in printed
    rows = read(tmp_path / "m.csv", BuildRow)
    assert [(row.mask, row.seq_len, row.status) for row in rows] == [
        (mask, n, OK) for mask in ("causal", "local:256") for n in (1024, 2048)
    ]
    assert "mask=[causal,local:256]" in rows[0].command
