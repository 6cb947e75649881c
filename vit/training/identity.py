"""What makes a run this one: its images, and all of its configuration that changes a number."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

from vit.config import RENAMED_KEYS, Config, flatten_config, load_config, plain_values
from vit.runtime.arguments import shorten

# where the images lie or are cached, and how many processes decode them, changes no number; class names are in the
# fingerprint of the data
NEUTRAL_KEYS = {
    *("data.workers", "data.cache_dir", "data.memory_fraction", "data.root", "data.class_names", "train.keep_limit"),
    *("train.timeout_seconds", "data.remote_cache_gb"),
}
# keys that came after the first run identities: while they have their default, a run keeps the identity that it had
_LATER_KEYS = {
    *("train.class_balance", "train.select_by", "train.early_stopping_patience", "train.patch_drop_rates"),
    "data.shuffle_window",
}

_NOTHING_GIVEN: dict[str, Any] = {"given.transform": None, "given.model": None}


@dataclass(frozen=True)
class RunIdentity:
    """Equal for two runs exactly where one may continue the other."""

    settings: Mapping[str, Any]  # section.key → plain value
    data_fingerprint: str

    @classmethod
    def from_config(cls, config: Config, given: Mapping[str, str] | None = None, *, data_fingerprint: str) -> Self:
        """`given`: what a program gave beside the configuration, which no other file tells."""
        settings = {key: value for key, value in _flatten(config).items() if key not in NEUTRAL_KEYS}
        return cls(settings | dict(given or {}), data_fingerprint)

    @cached_property
    def run_id(self) -> str:
        """16 hexadecimal digits."""
        default = _flatten(Config())
        known = {k: v for k, v in self.settings.items() if k not in _LATER_KEYS or v != default[k]}
        text = json.dumps([known, self.data_fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        config_sha256 = hashlib.sha256(json.dumps(dict(self.settings), sort_keys=True).encode()).hexdigest()
        hashes = {"config_sha256": config_sha256, "data_fingerprint": self.data_fingerprint}
        return {"run_id": self.run_id, **hashes, "settings": dict(self.settings)}

    def check(self, recorded: Mapping[str, Any], *, origin: str, extends: bool = False) -> None:
        """Raise ValueError naming what differs from the identity that `to_dict` gave; `extends`: but for the epochs."""
        theirs = _NOTHING_GIVEN | {RENAMED_KEYS.get(key, key): value for key, value in recorded["settings"].items()}
        ours = _NOTHING_GIVEN | dict(self.settings)
        differing = [key for key in ours if key in theirs and theirs[key] != ours[key]]
        differing = [key for key in differing if not (extends and key == "train.epochs")]
        found = [f"{key} is {shorten(str(theirs[key]))} there, {shorten(str(ours[key]))} here" for key in differing[:3]]
        if recorded["data_fingerprint"] != self.data_fingerprint:
            both = f"{recorded['data_fingerprint'][:16]} there, {self.data_fingerprint[:16]} here"
            found.append(f"the training images are others (fingerprint {both})")
        if found:
            cure = "resume with what it began with, or remove it"
            raise ValueError(f"{origin} belongs to another run: {'; '.join(found)}; {cure}")


def _flatten(config: Config) -> dict[str, Any]:
    sections = plain_values(config).items()
    return {f"{section}.{key}": value for section, keys in sections for key, value in keys.items()}


def find_changes(config: Config, saved: Path) -> list[str]:
    """Keys in which `config` would continue another run than the one whose configuration is `saved`."""
    ours, theirs = flatten_config(config), flatten_config(load_config(saved))
    return [key for key in ours if ours[key] != theirs[key] and key not in NEUTRAL_KEYS]
