"""Programs run with python -m; bad options end in one line and exit status 2, never in a trace."""

import re
import shlex

import pytest
import torch

from experiments.common.provenance import ROOT

BAD = {
    "speed +seqlen=3": "option='seqlen': choose from",
    "speed csv=0": "csv=0: give a path, and write csv=./0 for that name",
    "speed seconds=abc": "seconds='abc': give a number above 0",
    "speed seconds=0": "seconds=0: give a number above 0",
    "speed kv_heads=0": "kv_heads=0: give a whole number",
    "speed directions=[]": "directions=[]: give at least one",
    "speed directions=null": "directions=None: give at least one",
    "speed mask=[]": "mask=[]: give at least one",
    "speed seq_len=[]": "seq_len=[]: give at least one",
    "speed seq_len=abc": "seq_len='abc': give a whole number",
    "speed heads=1.5": "heads=1.5: give a whole number",
    "speed block_size=abc": "block_size='abc': give a whole number",
    "speed block_size=24 seq_len=64": "block_size",
    "speed mask=3": "mask",
    "speed mask=nothing:1": "unknown pattern 'nothing'",
    "speed device=gpu": "device='gpu': choose from cpu, cuda",
    "speed device=cuda": "device='cuda': torch finds no GPU here",
    "speed providers=3": "providers=3: choose from reference",
    "speed directions=up": "directions='up': choose from forward",
    "speed workers=-1": "workers=-1: give a whole number",
    "speed grid=all": "grid='all': choose from limits",
    "speed seq_len=16 fresh=no": "fresh='no': give true or false",
    "speed seq_len=16 allow_changes=0": "allow_changes=0: give true or false",
    "papers.io measure=no": "measure='no': give true or false",
    "plot csv=none.csv": "none.csv cannot be read",
    "plot csv=.": ". cannot be read",
    "plot csv=docs/results/h200/limits.csv.gz pages=[none.md]": "pages=none.md cannot be read",
    "plot csv=docs/results/h200/limits.csv.gz pages=[LICENSE]": "the page has no line <!-- rows",
    "speed rounds=0": "rounds=0: give a whole number",
    "compare csv=none.csv": "none.csv cannot be read",
    "selection density=abc": "density='abc': give a number above 0",
    "selection heads=two": "heads='two': give a whole number",
    "selection kv_heads=0": "kv_heads=0: give a whole number",
    "selection seconds=0": "seconds=0: give a number above 0",
    "selection dtype=float8": "dtype='float8': choose from float32",
    "selection 'selectors=[\"causal()\"]'": "'causal()' is no selector",
    "mask_build seq_len=x": "seq_len='x': give a whole number",
    "mask_build limit_gib=x": "limit_gib='x': give a number above 0",
    "mask_build mask=[] seq_len=64": "mask=[]: give at least one",
    "mask_build seq_len=[]": "seq_len=[]: give at least one",
    "mask_build mask=[causal,nothing] seq_len=64": "unknown pattern 'nothing'",
    "mask_build mask=neighborhood seq_len=[400,300]": "300 tokens are no square image",
    "mask_build seq_len=64 block_size=7": "block_size is 7: give multiples of 16",
    "mask_build builders=fast": "builders='fast': choose from masks",
    "mask_build device=cuda:3": "device='cuda:3': torch finds",
    "lra_speed seconds=0": "seconds=0: give a number above 0",
    "lra_speed tokens=0": "tokens=0: give a whole number",
    "tune workers=2": "needs a GPU",
    "pathfinder.__main__ size=33 statistics=true": "Pathfinder of size 33: choose from 32, 64",
    "pathfinder.__main__ examples=0 statistics=true": "examples=0: give a whole number",
    "pathfinder.__main__ size=[] statistics=true": "size=[]: give at least one",
    "pathfinder.__main__ contour=null statistics=true": "contour=None: give at least one",
    "pathfinder.__main__ size=32.0 statistics=true": "Pathfinder of size 32.0: choose from",
    "pathfinder.__main__ workers=x statistics=true": "workers='x': give a whole number",
    "pathfinder.__main__ seed=0": "nothing to do: give out=FOLDER",
    "pathfinder.studies.cuts run=none": "run=none: no config.yaml there",
    "pathfinder.studies.strokes +runs=none": "option='runs': choose from",
    "pathfinder.studies.shortcuts paddles=[15]": "paddles=[15]: give 0 to 14, the",
    "pathfinder.studies.directions steps=x": "steps='x': give a whole number",
    "lm.__main__ plan=all": "plan='all': choose from same",
    "lm.__main__ seeds=[0,1]": "seeds=[0, 1] needs a plan: give plan=same|",
    "lm.__main__ report=true": "report=True needs a plan: give plan=same|",
    "lm.__main__ pattern=*.txt max_mib=1": "pattern=*.txt: is for a folder of text",
    "lm.__main__ data=none": "data=none: no such folder",
    "lm.generate.__main__": "run=FOLDER is missing",
    "lm.generate.__main__ run=none prompt=a": "run=none: no config.yaml there",
    "lm.generate.__main__ run=none": "prompt=None: give a text",
    "lm.generate.__main__ run=none prompt=a temperature=-1": "temperature=-1: give a number, at le",
    "lm.generate.__main__ run=none prompt=a tokens=0": "tokens=0: give a whole number, at least 1",
    "lm.generate.__main__ run=none prompt=a top_k=x": "top_k='x': give a whole number, at least 1",
    "papers.io methods=[flesh]": "did you mean flash",
    "papers.io n=[64,128]": "n=[64, 128]: give a whole number",
    "papers.io measure=false csv=none.csv": "measure first: python -m experiments.papers.io",
    "papers.attention_table lengths=[8]": "lengths=8: give a whole number, at least 16",
    "papers.attention_table variants=[all]": "variants='all': choose from plain",
    "papers.attention_table dropout=1.5": "give a number from 0 to below 1",
    "papers.decode lengths=[100]": "lengths=100: give multiples of 64",
    "papers.decode heads=6 kv_heads=4": "heads=6 is not a multiple of kv_heads=4",
    "papers.decode providers=[flashinfr]": "did you mean flashinfer",
    "papers.decode n_q=[0]": "n_q=0: give a whole number, at least 1",
    "papers.decode masks=[nothing]": "unknown pattern 'nothing'",
    "papers.term_costs terms=[softcup]": "did you mean softcap",
    "papers.term_costs backends=[reference]": "backends='reference': choose from hopper",
    "papers.term_costs densities=[0]": "densities=0: give a number above 0",
    "papers.term_costs kv_heads=0": "kv_heads=0: give a whole number",
    "papers.term_costs seconds=0": "seconds=0: give a number above 0",
    "papers.term_costs radius=x": "radius='x': give a whole number",
    "papers.accuracy outliers=2": "outliers=2: give a share between 0 and 1",
    "papers.accuracy dtypes=[float8]": "dtypes='float8': choose from",
    "papers.accuracy lengths=[0]": "=0: give a whole number, at least 8",
    "papers.accuracy pages=[none.md]": "pages=none.md cannot be read",
    "papers.picks 'selectors=[\"top_k(2)\"]'": "top_k(2) has no picks; give moba or nsa",
    "papers.picks 'selectors=[\"nsa(2, 32, union=True)\"]'": "has no picks; give moba or nsa",
    "papers.picks heads=3 kv_heads=2": "heads=3 is not a multiple of kv_heads=2",
    "papers.picks heads=0": "heads=0: give a whole number",
    "papers.picks kv_heads=0": "kv_heads=0: give a whole number",
    "papers.picks seconds=0": "seconds=0: give a number above 0",
    "papers.picks providers=[flex]": "providers",
    "papers.picks lengths=[64,x]": "lengths",
    "papers.softmax.__main__ k=[301] vocabularies=[10,300]": "k=301: at most the largest of vocab",
    "papers.softmax.__main__ seconds=0": "seconds=0: give a number above 0",
    "papers.softmax.__main__ batches=[x]": "batches='x': give a whole number",
    "papers.softmax.__main__ algorithms=[onlin]": "did you mean online",
    "papers.softmax.__main__ implementation=cuda": "'cuda': choose from triton, blocks",
    "papers.softmax.__main__ limit_gib=1e-9": "no shape fits",
    "papers.softmax.__main__ pages=[none.md]": "pages=none.md cannot be read",
    "papers.softmax.__main__ measure=false": "measure first",
    "papers.packed_masks kinds=[trees]": "did you mean tree",
    "papers.io parts=[]": "parts=[]: give at least one",
    "papers.io pages=[none.md]": "pages=none.md cannot be read",
    "papers.io pages=[LICENSE]": "pages=LICENSE: it has no line <!-- rows: NAME",
    "papers.io plots=LICENSE": "cannot use LICENSE (File exists): name another place",
    "papers.memory lengths=[]": "lengths=[]: give at least one",
    "papers.memory plots=LICENSE": "cannot use LICENSE (File exists): name another place",
    "papers.attention_table methods=[]": "methods=[]: give at least one",
    "papers.attention_table methods=[local] peers_to=64": "peers_to=64: all lengths are above",
    "papers.attention_table plots=LICENSE": "cannot use LICENSE (File exists): name another place",
    "papers.decode masks=[]": "masks=[]: give at least one",
    "papers.decode providers=[sdpa] pages=[16]": "providers=sdpa: none takes these masks and pages",
    "papers.term_costs terms=[]": "terms=[]: give at least one",
    "papers.term_costs densities=[0.5,2]": "densities=2: give shares of at most 1",
    "papers.term_costs terms=[bias] backends=hopper": "terms=bias: backends=hopper has none",
    "papers.accuracy head_dims=null": "head_dims=None: give at least one",
    "papers.accuracy outliers=true": "outliers=True: give a share between 0 and 1",
    "papers.picks providers=[]": "providers=[]: give at least one",
    "papers.softmax.__main__ vocabularies=[]": "vocabularies=[]: give at least one",
    "papers.softmax.__main__ out=LICENSE": "cannot use LICENSE (File exists): name another place",
    "papers.packed_masks seq_lens=[128,129]": "seq_lens=129: give even numbers",
    "papers.packed_masks compiled=[trees]": "did you mean tree",
    "papers.memory dim=100": "give a multiple of 2 * heads",
    "papers.memory layers=2": "layers=2: give a whole number, at least 4",
    "counters provider=hoper": "did you mean hopper",
    "counters heads=x": "heads='x': give a whole number",
    "counters mask=local:8": "need a CUDA device",
}


def test_python_m_runs_each_program():
    texts = {path: path.read_text() for path in (ROOT / "experiments").rglob("*.py")}
    programs = [
        path for path, text in texts.items() if re.search(r"^(@program|def main\(\))", text, re.M)
    ]
    assert len(programs) > 30
    for path in programs:
        commands = texts[path].partition('\nif __name__ == "__main__":\n')[2]
        assert "    main()\n" in commands, path


@pytest.mark.skipif(torch.cuda.is_available(), reason="here is a GPU")
@pytest.mark.parametrize("command", BAD)
def test_a_bad_option_is_one_line(command, run_program, tmp_path):
    module, *words = shlex.split(command)
    csv = tmp_path / "rows.csv"
    measures = module.startswith(
        ("speed", "selection", "lra_speed", "mask_build", "tune", "papers.")
    )
    if measures and "csv=" not in command:
        words.append(f"csv={csv}")
    status, _, error = run_program(module, *words)
    assert status == 2 and BAD[command] in error
    assert error.startswith("error: ") and error.count("\n") == 1
    assert not csv.exists()


def test_a_file_that_cannot_be_written_is_one_line(run_program, tmp_path):
    (tmp_path / "file").write_text("")
    status, _, error = run_program("speed", f"csv={tmp_path}/file/rows.csv", "seq_len=64")
    assert status == 2 and "name another file with csv=" in error
