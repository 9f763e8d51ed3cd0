"""The entry of programs: unknown options, bad values and sweeps end in a line, not a trace."""

import errno
import os
import signal
import subprocess
import sys

import pytest

from experiments.common.program import help_text, program
from experiments.lra.settings import TrainOptions
from experiments.plot import Options
from experiments.table import Options as TableOptions
from tests.processes import ROOT, in_a_new_process

OPTIONS = {"plot": Options, "train": TrainOptions, "table": TableOptions}


def run(monkeypatch, main, *words, name="plot"):
    monkeypatch.setattr(sys, "argv", ["program", *words])
    try:
        program(name, OPTIONS[name], made=name != "train")(main)()
    except SystemExit as stop:
        return stop.code
    return 0


def test_a_program_gets_its_options_and_its_command(monkeypatch):
    seen = []
    assert run(monkeypatch, lambda *given: seen.append(given), "out=a b", "rows=x.jsonl") == 0
    ((options, command),) = seen
    assert options == Options("x.jsonl", "a b", None, True)
    assert command == "python -m experiments.plot 'out=a b' rows=x.jsonl"


@pytest.mark.parametrize(
    ("name", "words", "begin", "right"),
    [
        *(
            ("plot", word, "option='rowz': choose from rows, out", "rows")
            for word in ("rowz=x.jsonl", "+rowz=x", "++rowz=1", "+rowz.a=1")
        ),
        ("train", "model.dims=8", "option='model.dims': choose from model.", "model.dim"),
        ("train", "stps=8", "option='stps': choose from scale, seed", "steps"),
    ],
)  # fmt: skip
def test_an_unknown_option_or_file_is_refused_with_the_choices(
    monkeypatch, capsys, name, words, begin, right
):
    assert run(monkeypatch, lambda *_: None, *words.split(), name=name) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: {begin}") and error.endswith(f"(did you mean {right}?)\n")


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("train", "attention=linformer attention.rank=8 model.dim=8"),
        ("train", "--config-dir . task=image"),
        ("train", "task=image task.order=hilbert +task.workers=2 hydra.verbose=false"),
        ("plot", "hydra.verbose=false"),
        ("plot", "--config-name plot"),  # a word of a flag of Hydra
    ],
)
def test_known_options_pass(monkeypatch, name, words):
    assert run(monkeypatch, lambda *_: None, *words.split(), name=name) == 0


@pytest.mark.parametrize("words", [["a.csv"], ["rows=b", "a.csv"], ["-m", "a.csv", "rows=a,b"]])
def test_a_word_without_a_value_is_one_line(words, monkeypatch, capsys):
    assert run(monkeypatch, lambda *_: None, *words) == 2
    expected = "error: a.csv: give options as NAME=VALUE, without spaces around =\n"
    assert capsys.readouterr().err == expected


def test_the_value_of_another_option_and_of_one_that_is_not_there(monkeypatch, capsys):
    given = []
    assert run(monkeypatch, lambda *options: given.append(options), "rows=${out}") == 0
    ((options, command),) = given
    assert options.rows == options.out and command.endswith(" 'rows=${out}'")
    assert run(monkeypatch, lambda *_: None, "rows=${nothing}") == 2
    assert "'nothing' not found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (ValueError("out=3: give a folder"), "out=3: give a folder"),
        (OSError(errno.EROFS, "No", "a/b"), "cannot use a/b (No): name another place"),
    ],
)
def test_a_bad_value_is_one_line(monkeypatch, capsys, error, text):
    def fails(options, command):
        raise error

    assert run(monkeypatch, fails) == 2
    assert capsys.readouterr().err == f"error: {text}\n"


def test_other_errors_are_faults_and_keep_their_trace(monkeypatch):
    def fails(options, command):
        raise KeyError("a fault")

    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    with pytest.raises(KeyError):
        run(monkeypatch, fails)


def test_ctrl_c_is_one_line(monkeypatch, capsys):
    def stopped(options, command):
        raise KeyboardInterrupt

    before = signal.getsignal(signal.SIGINT)
    assert run(monkeypatch, stopped) == 130
    assert signal.signal(signal.SIGINT, before) is signal.SIG_DFL  # a second one ends it at once
    assert capsys.readouterr().err == "interrupted\n"


def test_output_that_nobody_reads_any_more_is_one_line():
    """Also where all of it is written at the end, as here."""
    code = (
        "from experiments.plot import Options, program\n"
        "program('plot', Options)(lambda options, command: print(command))()"
    )
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONUNBUFFERED": ""}, cwd=ROOT,
        text=True, stdout=write, stderr=subprocess.PIPE,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


def test_ctrl_c_has_its_usual_effect_in_programs_that_import_ours():
    in_a_new_process("-c", "import signal, experiments.pathfinder.__main__; "
        "assert signal.getsignal(signal.SIGINT) is signal.default_int_handler")  # fmt: skip


def test_the_remaining_jobs_of_a_sweep_still_run(monkeypatch, capsys, tmp_path):
    seen = []

    def main(options, command):
        seen.append(options.out)
        if options.out == "a":
            raise ValueError("not a")

    assert run(monkeypatch, main, "out=a,b", f"hydra.sweep.dir={tmp_path}", "-m") == 2
    assert seen == ["a", "b"]
    assert "failed: out=a\n" in capsys.readouterr().err


@pytest.mark.parametrize("value", ["local(8)", "local(8) | causal()", "moba(64, 3)", "a=b", "[a"])
def test_a_value_that_hydra_cannot_read_is_one_line(value, monkeypatch, capsys):
    assert run(monkeypatch, lambda *_: None, f"rows={value}") == 2
    hint = f"quote the value inside the shell's quotes, 'rows=\"{value}\"'"
    assert capsys.readouterr().err == f"error: rows={value}: {hint}\n"
    assert run(monkeypatch, lambda *_: None, f'rows="{value}"') == 0


def test_each_text_of_a_list_is_quoted(monkeypatch, capsys):
    assert run(monkeypatch, lambda *_: None, "runs=[a,local(8)]", name="table") == 2
    hint = """quote each text of the list inside the shell's quotes, 'runs=["...","..."]'"""
    assert capsys.readouterr().err == f"error: runs=[a,local(8)]: {hint}\n"
    assert run(monkeypatch, lambda *_: None, 'runs=["a","local(8)"]', name="table") == 0


def test_help_says_what_each_option_is():
    lines = help_text("plot", "COMMAND", "About.", Options).splitlines()
    assert lines[0] == "About." and "usage: COMMAND [OPTION=VALUE ...]" in lines
    assert any(line.startswith("  triton=null  ") and "of Triton" in line for line in lines)


def test_help_names_the_choices_of_a_group():
    lines = help_text("train", "COMMAND", None, TrainOptions).splitlines()
    (found,) = [line for line in lines if line.strip().startswith("attention=sparse")]
    assert "flash" in found and "reformer" in found


def test_files_of_a_users_folder_stand_beside_ours(monkeypatch, capsys, tmp_path):
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "mine.yaml").write_text(
        "# @package _global_\ndefaults: [listops]\ntask: { max_length: 77 }\n"
    )
    seen = []
    words = ["--config-dir", str(tmp_path), "task=mine", "task.limit=3"]
    assert run(monkeypatch, lambda options, _: seen.append(options), *words, name="train") == 0
    assert seen[0]["task"]["max_length"] == 77 and seen[0]["task"]["name"] == "listops"
    assert run(monkeypatch, main_of_no_use, *words[:2], "task=other", name="train") == 2
    assert "mine" in capsys.readouterr().err
    words[1] = str(tmp_path / "nowhere")
    assert run(monkeypatch, main_of_no_use, *words, name="train") == 2
    assert "nowhere: there is no such folder" in capsys.readouterr().err


def test_a_folder_that_cannot_be_made_is_one_line(monkeypatch, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    place = tmp_path / "file" / "below"
    assert run(monkeypatch, main_of_no_use, f"hydra.run.dir={place}") == 2
    told = capsys.readouterr().err
    assert str(place) in told and told.count("\n") == 1


def main_of_no_use(options, command):
    raise AssertionError("it must not run")
