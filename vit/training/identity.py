"""The identity of a run: its images and what of its configuration changes a number."""

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from vit.config import Config, values_to_save
from vit.runtime.arguments import shorten

# The keys that change a number, or all of a section. Everything else, such as where images lie, how
# many processes decode them, or when a checkpoint is written, may be another when a run goes on.
_COUNTED = {
    "data": "name label_by path_column label_column split_column group_column task classes"
    " corrections image_size crop_pct resize_mode value_range mean std test_fraction"
    " validation_fraction split_seed group_by group_duplicates pipeline",
    "train": "epochs max_steps batch_size seed precision label_smoothing clip_grad ema_decay"
    " image_sizes patch_drop_rates class_balance select_by",
}

# The keys that may be larger when a run that has ended is trained longer.
LENGTHS = ("train.epochs", "train.max_steps")


def identify_run(config: Config, fingerprint: str, passed: Mapping[str, object]) -> dict[str, Any]:
    """Return what is equal for two runs exactly if one may continue the other. `passed` has the
    objects from Python, or None, by the names of the arguments of `vit.train`."""
    counted: dict[str, Any] = {"the fingerprint of the training images": fingerprint}
    for section, values in values_to_save(config).items():
        names = _COUNTED.get(section, " ".join(values)).split()
        counted |= {f"{section}.{name}": values[name] for name in names}
    for name, value in passed.items():
        # An object's address in memory is another one in each process.
        text = " ".join(re.sub(" at 0x[0-9a-f]+", "", repr(value)).split())
        if isinstance(value, nn.Module):
            text = type(value).__qualname__
        counted[f"the argument {name}"] = text
    return counted


def compute_run_id(identity: Mapping[str, Any]) -> str:
    """Return 16 hexadecimal digits for an identity."""
    text = json.dumps(identity, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def check_same_run(
    identity: Mapping[str, Any], recorded: Mapping[str, Any], *, origin: str
) -> None:
    """Raise ValueError, which names the differences, if the identity that was recorded in `origin`
    is that of another run."""
    differences = [
        f"{key} is {shorten(str(recorded.get(key)))} there, {shorten(str(value))} here"
        for key, value in identity.items()
        if value != recorded.get(key)
    ]
    if differences:
        raise ValueError(
            f"{origin} belongs to another run: {'; '.join(differences[:3])}; resume with what it"
            " began with, or start another run, perhaps from its model with --init"
        )
