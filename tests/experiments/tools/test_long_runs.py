"""Long runs go on elsewhere."""

import json
import tarfile

import pytest
from omegaconf import OmegaConf

from experiments.tools.long_runs import main
from tests.experiments.lra.training.cases import overrides, train


def test_runs_go_on_elsewhere(tmp_path, capsys):
    """Take a complete run, which another waits for, to another folder, as an export in parts."""
    changes = {"eval_every": 30, "checkpoint_every": 1}
    common = overrides(tmp_path, "listops", "linear", steps=60, **changes)
    entries = {"one": {"with": ["steps=2"]}, "two": {"after": "one", "with": ["name=b"]}}
    OmegaConf.save({"common": common, "runs": entries}, tmp_path / "mine.yaml")
    export, file = f"{tmp_path}/out.tar.xz", f"file={tmp_path}/mine.yaml"

    def words(place, *more):
        return [
            file,
            f'overrides=["runs={tmp_path}/{place}"]',
            f"compiled={tmp_path}/compiled",
            *more,
        ]

    assert main(words("runs", "dry_run=true")) == 0
    assert "two: waits for one" in capsys.readouterr().out
    del entries["two"]
    OmegaConf.save({"common": common, "runs": entries}, tmp_path / "mine.yaml")
    train(tmp_path, "listops", "linear", steps=2, **changes)
    assert main(words("runs", f"export={export}", "part_mib=0.001", "weights=false")) == 0
    assert "one: complete" in capsys.readouterr().out and (tmp_path / "out.tar.xz.01").exists()
    assert main(words("other", f"import={export}", f"export={tmp_path}/whole.xz")) == 0
    assert "imported: 1 runs" in capsys.readouterr().out
    folder = tmp_path / "other/listops/linear/seed0"
    assert json.loads((folder / "journal.jsonl").read_text().splitlines()[-1])["step"] == 2
    names = [name.rpartition("/")[2] for name in tarfile.open(tmp_path / "whole.xz").getnames()]
    assert "journal.jsonl" in names and "checkpoint.pt" not in names and "weights.pt" not in names
    with pytest.raises(ValueError, match="nowhere"):
        main(words("other", "import=nowhere"))
