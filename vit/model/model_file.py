"""The format of our model files: a safetensors file, with everything but tensors as one JSON object in its metadata.

Nothing in it is ever unpickled. Other safetensors files are read too: their metadata is empty.
"""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vit.config import rename_old_keys
from vit.runtime.files import write_atomically

MODEL_FILE = "model.safetensors"
SCHEMA_VERSION = 2  # 1: the architecture says pool for global_pool, and the configuration has its old keys
_KEY = "vit"  # a single key: with several, safetensors writes them in random order
_HASHES = ("training_hashes/digests", "training_hashes/perceptual")

State = dict[str, Tensor]
Hashes = tuple[NDArray[np.uint64], NDArray[np.uint64]]


@dataclass(frozen=True)
class ModelFile:
    """Weights by name, the JSON object, and the hashes of the training images: SHA-256 digests and dHashes."""

    weights: State
    metadata: dict[str, Any] = field(default_factory=dict)
    training_hashes: Hashes | None = None


def read_model_file(path: Path) -> ModelFile:
    """Raises ValueError for a file that is cut off, has NaN among its weights or comes from a newer version."""
    try:
        with safe_open(path, framework="pt") as file:
            metadata = json.loads((file.metadata() or {}).get(_KEY, "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except FileNotFoundError:
        raise
    except (SafetensorError, OSError, ValueError) as error:
        raise ValueError(f"{path} is not a whole model file ({error}); copy or train it again") from error
    hashes = [weights.pop(name).numpy().view(np.uint64) for name in _HASHES if name in weights]
    check_finite(weights, origin=str(path))
    if metadata.get("schema_version", 0) > SCHEMA_VERSION:
        versions = f"schema version {metadata['schema_version']}, this program reads up to {SCHEMA_VERSION}"
        raise ValueError(f"{path} has {versions}; upgrade vit-pipeline")
    if metadata:  # older files have older names in them
        if "pool" in metadata["architecture"]:
            metadata["architecture"]["global_pool"] = metadata["architecture"].pop("pool")
        metadata["config"] = rename_old_keys(metadata["config"])
    return ModelFile(weights, metadata, (hashes[0], hashes[1]) if len(hashes) == 2 else None)


def write_model_file(path: Path, content: ModelFile) -> None:
    """Atomically. Equal contents give equal bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in content.weights.items()}
    for name, hashes in zip(_HASHES, content.training_hashes or (), strict=False):
        tensors[name] = torch.from_numpy(hashes.view(np.int64))
    text = {_KEY: json.dumps(content.metadata | {"schema_version": SCHEMA_VERSION}, sort_keys=True)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=text))


def check_finite(weights: State, *, origin: str) -> None:
    """Refuse NaN and infinity, naming the first tensor that has any."""
    for name, tensor in weights.items():
        if count := int((~tensor.isfinite()).sum()):
            raise ValueError(f"{origin}: {name} holds {count} NaN or infinite values; use an earlier copy")
