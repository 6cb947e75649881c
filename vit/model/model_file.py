"""The format of our model files: a safetensors file, with everything but tensors as one JSON object in its metadata.

Nothing in it is ever unpickled. Other safetensors files are read too: their metadata is empty.
"""

import hashlib
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

from vit.model.metadata import check_metadata
from vit.runtime.documents import parse_json
from vit.runtime.files import open_regular, write_atomically

MODEL_FILE = "model.safetensors"
SCHEMA_VERSION = 3  # 2: no checksum; 1: the architecture says pool for global_pool, the configuration has its old keys
_KEY = "vit"  # a single key: with several, safetensors writes them in random order
_CHECKSUM = "content_sha256"
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
    """Raises ValueError for a file that is cut off or damaged, has NaN among its weights, says what no model can be, or
    comes from a newer version."""
    open_regular(path).close()
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY, "{}")
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(f"{path} is not a whole model file ({error}); copy or train it again") from error
    metadata = parse_json(text, origin=str(path))
    if not isinstance(metadata, dict) or not isinstance(metadata.get("schema_version", 0), int):
        raise ValueError(f"{path} is damaged: its metadata is no object with a schema_version")
    if metadata.get("schema_version", 0) > SCHEMA_VERSION:
        versions = f"schema version {metadata['schema_version']}, this program reads up to {SCHEMA_VERSION}"
        raise ValueError(f"{path} has {versions}; upgrade vit-pipeline")
    checksum = metadata.pop(_CHECKSUM, None)
    if metadata.get("schema_version", 0) >= 3 and checksum != _compute_checksum(weights, metadata):
        raise ValueError(f"{path} is damaged: its content has another checksum than it records; copy or train it again")
    hashes = [weights.pop(name) for name in _HASHES if name in weights]
    if any(each.dtype != torch.int64 or each.shape != hashes[0].shape for each in hashes):
        raise ValueError(f"{path} is damaged: the hashes of its training images are no pairs of integers")
    check_finite(weights, origin=str(path))
    if metadata:
        metadata = check_metadata(metadata, origin=str(path))
    arrays = [each.numpy().view(np.uint64) for each in hashes]
    return ModelFile(weights, metadata, (arrays[0], arrays[1]) if len(arrays) == 2 else None)


def write_model_file(path: Path, content: ModelFile) -> None:
    """Atomically. Equal contents give equal bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in content.weights.items()}
    for name, hashes in zip(_HASHES, content.training_hashes or (), strict=False):
        tensors[name] = torch.from_numpy(hashes.view(np.int64))
    metadata = json.loads(json.dumps(content.metadata | {"schema_version": SCHEMA_VERSION}))
    metadata[_CHECKSUM] = _compute_checksum(tensors, metadata)
    text = {_KEY: json.dumps(metadata, sort_keys=True)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=text))


def hash_weights(weights: State) -> str:
    """SHA-256 of names and values."""
    digest = hashlib.sha256()
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _compute_checksum(tensors: State, metadata: dict[str, Any]) -> str:
    """SHA-256 of all that a file says."""
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    return hashlib.sha256(json.dumps([hash_weights(tensors), shapes, metadata], sort_keys=True).encode()).hexdigest()


def check_finite(weights: State, *, origin: str) -> None:
    """Refuse NaN and infinity, naming the first tensor that has any."""
    for name, tensor in weights.items():
        if tensor.is_floating_point() and tensor.element_size() == 1:
            raise ValueError(f"{origin}: {name} is {tensor.dtype}; convert it to float32")
        if count := int((~tensor.isfinite()).sum()):
            raise ValueError(f"{origin}: {name} holds {count} NaN or infinite values; use an earlier copy")
