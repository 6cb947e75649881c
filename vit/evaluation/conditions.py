"""The conditions of an evaluation: the recipe of the model, the machine, the command."""

import datetime
import hashlib
import json
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vit.bundle import collect_versions
from vit.prediction.predictor import Predictor
from vit.runtime.device import describe_device
from vit.runtime.processes import current_process

# Keys of the configuration that don't change the recipe: where the data lies, the machine, the
# seed, and how many images the model file keeps. Older model files also have data.check_cache.
_MACHINE_KEYS = {
    "data": ("root", "workers", "cache_dir", "check_cache"),
    "train": ("seed", "device", "max_training_features"),
}


def hash_recipe(config: Mapping[str, Any]) -> str | None:
    """Return a hash that is equal for training configurations that differ only in the seed or the
    machine; None without a configuration."""
    if not config:
        return None
    recipe = {
        section: {
            key: value for key, value in values.items() if key not in _MACHINE_KEYS.get(section, ())
        }
        for section, values in config.items()
    }
    return hashlib.sha256(json.dumps(recipe, sort_keys=True).encode()).hexdigest()


def describe_conditions(predictor: Predictor) -> dict[str, str | None]:
    """Return the conditions that an evaluation records, by name."""
    program = Path(sys.argv[0]).name
    if program == "__main__.py":
        program = "vit"
    return {
        "device": describe_device(predictor.device),
        "processes": str(current_process().world_size),
        "precision": predictor.precision,
        "batch size": str(predictor.batch_size),
        "tta": None if predictor.tta == "none" else predictor.tta,
        "command": shlex.join([program, *sys.argv[1:]]),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        **collect_versions(),
    }
