"""The archive, the table and the figures of accuracy against length, from made-up runs."""

import pytest

from experiments.common.rows import frame
from experiments.lra.runs import read_runs
from experiments.studies.long_documents import Options, collect, figures, tables
from tests.experiments.lra.made_runs import write_run

SOURCE = "Python packages 0123abcd, 6 labels, 10 + 5 + 5 files"


def test_the_study_archives_the_runs_of_documents_and_draws_each_set(tmp_path):
    for length, accuracy in {512: 0.5, 1024: 0.6, 16384: 0.75}.items():
        for attention, ms in (("flash", length / 100), ("sparse", 4.0)):
            about = {"source": SOURCE, "length": length, "ms": ms, "accuracy": accuracy}
            write_run(tmp_path / f"runs/{length}", "files", attention, **about)
    write_run(tmp_path / "runs", "listops", "flash")
    with pytest.raises(ValueError, match="runs: none has task=files"):
        collect(Options(runs=[f"{tmp_path}/runs/listops"], rows=f"{tmp_path}/none.jsonl.gz"))
    held_out = {"settings": {"task": {"held_out": 0.1}}}
    for name, more in (("a", {}), ("b", held_out)):
        about = {"source": "official", "length": 1024, "accuracy": 0.6}
        write_run(tmp_path / f"runs/{name}", "text", "flash", **about, **more)
    rows = f"{tmp_path}/some.jsonl.gz"
    collect(Options(runs=[f"{tmp_path}/runs"], rows=rows))
    assert {run.task for run in read_runs(rows)} == {"files", "text"}
    assert "| 50.0 | 60.0 | 75.0 |" in tables(frame(rows))["accuracy"]
    drawn = figures(frame(rows))
    assert [*drawn] == [
        "long-documents-files-python-packages-0123abcd", "long-documents-text-official",
        "long-documents-text-official-10-held-out",
    ]  # fmt: skip
    x, y = drawn["long-documents-files-python-packages-0123abcd"].axes[1].lines[0].get_data()
    assert [*x] == [512, 1024, 16384] and y[-1] in (4.0, 163.84)
