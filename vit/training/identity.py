"""What makes a run this one: its images, and all of its configuration that changes a number; and
under what conditions it computes, which change the last bits."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Self

from vit.config import Config, plain_values
from vit.runtime.arguments import shorten

# where the images lie or are cached, and how many processes decode them, changes no number; class
# names are in the fingerprint of the data
_NEUTRAL_KEYS = {
    "data.workers",
    "data.cache_dir",
    "data.root",
    "data.allow_outside",
    "data.class_names",
    "train.max_training_features",
    "train.timeout_seconds",
}


@dataclass(frozen=True)
class RunIdentity:
    """Equal for two runs exactly where one may continue the other.

    Args:
        settings: "section.key" → plain value, of all that changes a number.
        data_fingerprint: of the training images.
        conditions: name → value of what changes the last bits of a number alone: the kind of
            device, the precision that was chosen for it, torch's version. A run may go on under
            others, with a warning.
    """

    settings: Mapping[str, Any]
    data_fingerprint: str
    conditions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_config(
        cls,
        config: Config,
        user_objects: Mapping[str, str | None] | None = None,
        *,
        data_fingerprint: str,
        conditions: Mapping[str, str] | None = None,
    ) -> Self:
        """The identity of a run.

        Args:
            config: of the run.
            user_objects: descriptions of what was passed from Python beside the configuration.
            data_fingerprint: of the training images.
            conditions: under which it computes.
        """
        settings = {
            f"{section}.{key}": value
            for section, values in plain_values(config).items()
            for key, value in values.items()
            if f"{section}.{key}" not in _NEUTRAL_KEYS
        }
        settings |= user_objects or {}
        return cls(settings, data_fingerprint, conditions or {})

    @cached_property
    def run_id(self) -> str:
        """16 hexadecimal digits."""
        text = json.dumps([self.settings, self.data_fingerprint], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def to_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {
            "run_id": self.run_id,
            "data_fingerprint": self.data_fingerprint,
            "settings": self.settings,
            "conditions": self.conditions,
        }

    def check(self, recorded: Mapping[str, Any], *, origin: str) -> None:
        """Refuse what another run left.

        Args:
            recorded: what `to_dict` gave.
            origin: what it was found in, for the message.

        Raises:
            ValueError: naming what differs.
            TypeError: the record is damaged.
        """
        # which nothing reads before the state is restored
        if not isinstance(recorded["conditions"], Mapping):
            raise TypeError("damaged conditions")
        theirs = recorded["settings"]
        ours = self.settings
        # a setting that is in one of them alone was passed from Python
        differing = [key for key in {**ours, **theirs} if ours.get(key) != theirs.get(key)]
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

    def describe_changed_conditions(self, recorded: Mapping[str, Any]) -> str | None:
        """A sentence for a run that goes on under other conditions than it was saved under; None
        where they are the same.

        Args:
            recorded: what `to_dict` gave.
        """
        changes = [
            f"{name} was {recorded['conditions'].get(name)} and is {value}"
            for name, value in self.conditions.items()
            if recorded["conditions"].get(name) != value
        ]
        if not changes:
            return None
        return f"{'; '.join(changes)}: the run goes on, but not to the same last bits"
