"""Options of the programs of Pathfinder, and tiny runs for the studies of trained models."""

from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from experiments.common.program import CONF
from experiments.lra.run import train
from experiments.lra.settings import compose_settings


def options(program: str, **changes: object) -> dict[str, Any]:
    """The options of a program, as its configuration has them but for the changes."""
    config: Any = OmegaConf.to_container(OmegaConf.load(CONF / f"{program}.yaml"))
    changes |= {k: config[k] | v for k, v in changes.items() if isinstance(v, dict)}
    return config | changes


def small_run(place: Path, *words: str) -> Path:
    """Trains for two steps, with all files below `place`. Returns the folder of the run."""
    small = "model.layers=1 model.dim=16 model.heads=1 model.head_dim=16 model.mlp_dim=16".split()
    small += ["attention=linear", "steps=2", "batch=4", "scale=full", "device=cpu", "eval_every=2"]
    small += [f"runs={place}/runs", f"cache_dir={place}/data", "tensorboard=false"]
    settings = compose_settings([*small, "task.generate=true", "task.examples=[8,4,4]", *words])
    train(settings)
    return settings.folder
