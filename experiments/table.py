"""Writes the Long Range Arena table of training runs: Markdown, text and CSV.

    python -m experiments.table
    python -m experiments.table 'runs=[runs/train,other/*/train]' out=runs/lra/table
    python -m experiments.table runs=runs/train/image archive=docs/results/lra/runs/image.jsonl

Runs are folders of experiments.train, or archives of them. See docs/guide/lra.md.
"""

from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf

from experiments.lra.run_files import read_runs, write_archive
from experiments.lra.speed_rows import read
from experiments.lra.table import Table, as_text, write


@hydra.main(version_base="1.3", config_path="conf", config_name="table")
def entry(config: DictConfig) -> None:
    options = OmegaConf.to_container(config, resolve=True)
    assert isinstance(options, dict)
    runs = read_runs(options["runs"])
    table = Table(runs, read(options["speed"]) if options["speed"] else None)
    paths = write(table, Path(options["out"]))
    if options["archive"]:
        write_archive(runs, Path(options["archive"]))
        paths.append(Path(options["archive"]))
    print(as_text(table))
    print("\n".join(f"written: {path}" for path in paths))


if __name__ == "__main__":
    entry()
