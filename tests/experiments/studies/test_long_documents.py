"""Tables and figures of accuracy against length, from made-up runs."""

import pytest

from experiments.common.rows import frame
from experiments.common.tables import markdown
from experiments.lra.runs import read_runs, write_archive
from experiments.studies import long_documents
from experiments.studies.long_documents import documents, lines
from tests.experiments.lra.made_runs import write_run

SOURCE = "Python packages 0123abcd, 6 labels, 10 + 5 + 5 files"
RISE = {512: 0.5, 1024: 0.6, 16384: 0.75}


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for length, accuracy in RISE.items():
        for seed in (0, 1):
            for attention, ms in (("flash", length / 100), ("sparse", 4.0)):
                about = {"source": SOURCE, "length": length, "seed": seed, "ms": ms}
                about |= {"more": {"density": 0.25}} if attention == "sparse" else {}
                place = root / str(length) / attention
                write_run(place, "files", attention, accuracy=accuracy + seed / 100, **about)
    write_run(root, "text", "flash", source="official", length=16384)
    write_run(root, "listops", "flash")
    return read_runs(str(root))


def test_each_set_of_documents_has_a_table_by_length(found):
    sets = documents(found)
    assert list(sets) == ["Files (Python packages 0123abcd)", "Text (official)"]
    head, *rows = lines(sets["Files (Python packages 0123abcd)"])
    table = {row[0]: row[1:] for row in rows}
    assert head == ["", "512", "1k", "16k"]
    accuracies = ["50.5 ± 0.7 (2)", "60.5 ± 0.7 (2)", "75.5 ± 0.7 (2)"]
    assert table["FlashAttention, accuracy (%)"] == accuracies
    assert table["  density of its blocks (%)"] == ["25.0"] * 3
    assert [row[1:] for row in rows if row[0] == "  ms a step"] == [
        ["5.12", "10.2", "164"],
        ["4", "4", "4"],
    ]
    assert table["shortcut: majority"] == ["17.5"] * 3


def test_reviews_of_another_validation_split_are_a_set_of_their_own(tmp_path):
    held_out = {"settings": {"task": {"held_out": 0.1}}}
    for attention, lengths in (("flash", (1024, 4096, 16384)), ("standard", (1024, 4096))):
        for length in lengths:
            about = {"length": length, "accuracy": 0.6 + length / 1e5, "source": "official"}
            write_run(tmp_path / str(length), "text", attention, **about, **held_out)
    write_run(tmp_path / "other", "text", "flash", source="official", length=1024, accuracy=0.9)
    sets = documents(read_runs(str(tmp_path)))
    assert sorted(sets) == ["Text (official)", "Text (official, 10 % held out)"]
    assert lines(sets["Text (official, 10 % held out)"])[0] == ["", "1k", "4k", "16k"]


def test_the_study_archives_the_runs_of_documents_and_draws_them(found, tmp_path, run_program):
    write_archive(found, tmp_path / "all.jsonl")
    words = [f"runs=[{tmp_path}/all.jsonl]", f"rows={tmp_path}/some.jsonl.gz", "device=cpu"]
    status, printed, error = run_program("study", "name=long_documents", *words)
    assert status == 0, error
    assert {run.task for run in read_runs(f"{tmp_path}/some.jsonl.gz")} == {"files", "text"}
    made = long_documents.tables(frame(tmp_path / "some.jsonl.gz"))
    assert "Text (official)" in made and all(text in printed for text in made.values())
    for name, cells in documents(found).items():
        assert made[name] == markdown(lines(cells))
    assert (tmp_path / "some" / "long-documents-text-official.png").stat().st_size > 500


def test_runs_of_other_tasks_are_refused(found):
    with pytest.raises(ValueError, match="no run has task=files or task=text; train first"):
        documents([run for run in found if run.task == "listops"])
