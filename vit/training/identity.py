"""The identity of a run: its images and what of its configuration changes a number."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch import nn

from vit.config import Config, plain_values
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


@dataclass(frozen=True)
class RunIdentity:
    """Equal for two runs exactly if one may continue the other.

    Args:
        settings: "section.key" → plain value of the whole configuration.
        counted: Those that count, the fingerprint of the training images, and what was passed from
            Python.
    """

    settings: Mapping[str, Any]
    counted: Mapping[str, Any]

    @classmethod
    def from_config(
        cls, config: Config, fingerprint: str, passed: Mapping[str, object] | None = None
    ) -> Self:
        """Return the identity of a run on images of this fingerprint. `passed` are objects from
        Python, or None, by the names of the arguments of `vit.train`."""
        settings: dict[str, Any] = {}
        counted: dict[str, Any] = {"the fingerprint of the training images": fingerprint}
        for section, values in plain_values(config).items():
            names = _COUNTED.get(section, " ".join(values)).split()
            settings |= {f"{section}.{name}": value for name, value in values.items()}
            counted |= {f"{section}.{name}": values[name] for name in names}
        for name, value in (passed or {}).items():
            # An object's address in memory is another one in each process.
            text = " ".join(re.sub(" at 0x[0-9a-f]+", "", repr(value)).split())
            if isinstance(value, nn.Module):
                text = type(value).__qualname__
            counted[f"the argument {name}"] = text
        return cls(settings, counted)

    @cached_property
    def run_id(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps(self.counted, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_record(self) -> dict[str, Any]:
        """Return the values that a checkpoint holds."""
        return {"run_id": self.run_id, "settings": self.counted}

    def check(self, recorded: Mapping[str, Any], *, origin: str) -> None:
        """Raise ValueError, which names the differences, for the record of another run that was
        found in `origin`."""
        theirs = recorded["settings"]
        differences = [
            f"{key} is {shorten(str(theirs.get(key)))} there, {shorten(str(value))} here"
            for key, value in self.counted.items()
            if value != theirs.get(key)
        ]
        if differences:
            raise ValueError(
                f"{origin} belongs to another run: {'; '.join(differences[:3])};"
                " resume with what it began with, or start another run, perhaps from its model with"
                " --init"
            )
