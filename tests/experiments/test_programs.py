"""A bad option ends in one line that names the option or its value, and exit status 2."""

import shlex
import subprocess
import sys

import pytest
import torch

BAD = """
speed +seqlen=3
speed rows=rows.csv
speed seconds=abc
speed seconds=0
speed kv_heads=0
speed directions=[]
speed mask=[]
speed heads=1.5
speed block_size=abc
speed seq_len=64 block_size=24
speed mask=nothing:1
speed device=gpu
speed device=cuda
speed providers=3
speed providers=[cpu,no_module:Mine]
speed directions=up
speed rounds=0
speed grid=all
speed grid=published
plot rows=none.jsonl
plot rows=.
pathfinder.__main__ size=33
pathfinder.__main__ examples=0
lm.__main__ data=none
""".strip().split("\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
def test_a_bad_option_is_one_line(run_program, tmp_path):
    for command in BAD:
        module, *words = shlex.split(command)
        if module == "speed" and "rows=" not in command:
            words.insert(0, f"rows={tmp_path}/rows.jsonl")
        status, _, error = run_program(module, *words)
        error = error[error.find("error: ") :]  # after a warning that the machine is busy
        name, _, value = words[-1].lstrip("+").partition("=")
        assert status == 2 and error.startswith("error: ") and error.count("\n") == 1, command
        assert name in error or value.strip("[]").partition(":")[0] in error, (command, error)
    assert not [*tmp_path.iterdir()]


def test_a_missing_extra_is_one_line():
    names = "train evaluate lm.__main__ sweep study speed plot table curves".split()
    code = f"""import importlib, sys
sys.modules["hydra"] = None
for name in {names}:
    try:
        importlib.import_module("experiments." + name)
    except SystemExit as stop:
        print(stop)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    said = "error: no module hydra: pip install 'sparseflash[experiments]'"
    assert done.stdout.splitlines() == [said] * len(names), done.stderr
