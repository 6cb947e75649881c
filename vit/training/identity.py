"""The identity of a run: its images and what of its configuration changes a number; and the
conditions under which it computes, which change the last bits."""

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self

from torch import nn

from vit.config import Config, plain_values
from vit.data.workers import Transform
from vit.model.checkpoint import IdentityRecord
from vit.runtime.arguments import shorten
from vit.training.losses import Loss

# The keys that change a number. Everything else, such as where images lie, how many processes
# decode them, or when a checkpoint is written, may be another when a run goes on.
_COUNTED_SECTIONS = ("augment", "model", "optimizer", "schedule")
_COUNTED_KEYS = {
    f"{section}.{key}"
    for section, keys in {
        "data": "name label_by path_column label_column split_column group_column task classes"
        " corrections image_size crop_pct resize_mode value_range mean std test_fraction"
        " validation_fraction split_seed group_by group_duplicates pipeline",
        "train": "epochs max_steps batch_size seed precision label_smoothing clip_grad ema_decay"
        " image_sizes patch_drop_rates class_balance select_by",
    }.items()
    for key in keys.split()
}


@dataclass(frozen=True)
class RunIdentity:
    """Equal for two runs exactly if one may continue the other.

    Args:
        settings: "section.key" → plain value; and what was passed from Python.
        data_fingerprint: Fingerprint of the training images.
        conditions: Name → value for what changes only the last bits of a number: the kind of
            device, the precision that was chosen for it, torch's version. A run may go on under
            other conditions, with a warning.
    """

    settings: Mapping[str, Any]
    data_fingerprint: str
    conditions: Mapping[str, str]

    @classmethod
    def from_config(
        cls,
        config: Config,
        *,
        data_fingerprint: str,
        conditions: Mapping[str, str],
        transform: Transform | None = None,
        model: nn.Module | None = None,
        loss: Loss | None = None,
    ) -> Self:
        """Return the identity of a run.

        Args:
            config: Configuration of the run.
            data_fingerprint: Fingerprint of the training images.
            conditions: Conditions under which the run computes.
            transform, model, loss: Objects passed from Python, which tell a run from others. Images
                have a fingerprint of their own.
        """
        settings = {
            f"{section}.{key}": value
            for section, values in plain_values(config).items()
            for key, value in values.items()
        }
        settings["the argument transform"] = None if transform is None else _describe(transform)
        settings["the argument model"] = None if model is None else type(model).__qualname__
        if loss is not None:
            settings["the argument loss"] = _describe(loss)
        return cls(settings, data_fingerprint, conditions)

    @cached_property
    def run_id(self) -> str:
        """16 hexadecimal digits."""
        counted = {key: value for key, value in self.settings.items() if _counts(key)}
        text = json.dumps([counted, self.data_fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_record(self) -> IdentityRecord:
        """Return the values that a checkpoint holds."""
        return {
            "run_id": self.run_id,
            "data_fingerprint": self.data_fingerprint,
            "settings": self.settings,
            "conditions": self.conditions,
        }

    def check(self, recorded: IdentityRecord, *, origin: str) -> None:
        """Refuse what another run left.

        Args:
            recorded: Result of `to_record`, from a file.
            origin: Where it was found, for the message.

        Raises:
            ValueError: The record is of another run; the message names the differences.
        """
        theirs = recorded["settings"]
        ours = self.settings
        # A setting that only one of them has was passed from Python.
        differing = [
            key for key in {**ours, **theirs} if _counts(key) and ours.get(key) != theirs.get(key)
        ]
        differences = [
            f"{key} is {shorten(str(theirs.get(key)))} there, {shorten(str(ours.get(key)))} here"
            for key in differing[:3]
        ]
        if recorded["data_fingerprint"] != self.data_fingerprint:
            differences.append("the training images are others")
        if differences:
            raise ValueError(
                f"{origin} belongs to another run: {'; '.join(differences)};"
                " resume with what it began with, or start another run, perhaps from its model with"
                " --init"
            )

    def describe_changed_conditions(self, recorded: IdentityRecord) -> str | None:
        """Return a sentence for a run that goes on under other conditions than it was saved under,
        or None if they are the same."""
        changes = [
            f"{name} was {recorded['conditions'].get(name)} and is {value}"
            for name, value in self.conditions.items()
            if recorded["conditions"].get(name) != value
        ]
        if not changes:
            return None
        return f"{'; '.join(changes)}: the run goes on, but not to the same last bits"


def _counts(key: str) -> bool:
    """Return whether another value of a setting makes another run."""
    section = key.partition(".")[0]
    passed = section.startswith("the argument")
    return passed or section in _COUNTED_SECTIONS or key in _COUNTED_KEYS


def _describe(function: object) -> str:
    """Describe a function that was passed from Python, the same in each process."""
    # An object's address in memory is another one in each process.
    return " ".join(re.sub(" at 0x[0-9a-f]+", "", repr(function)).split())
