"""The format of our model files: a safetensors file, with everything but tensors as one JSON object
in its metadata.

Nothing in a file is ever unpickled. A checksum tells damage; what the JSON object describes is
checked where it is built (`vit.model.weights.build_to_fit`). Other safetensors files are read too:
their metadata is empty.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from vit.model.find_file import MODEL_FILE as MODEL_FILE
from vit.runtime.arguments import first_line
from vit.runtime.documents import parse_json
from vit.runtime.files import write_atomically

SCHEMA_VERSION = 3
_KEY = "vit"  # a single key: with several, safetensors writes them in random order
_CHECKSUM = "content_sha256"
_NEEDED = {"class_names": list, "config": dict, "data": dict, "preprocess": dict}
# arrays that are kept among the weights
_HASHES = ("training_hashes/digests", "training_hashes/perceptual")
_LIKENESS = ("likeness/training_features", "likeness/distances")
StateDict = dict[str, Tensor]
Metadata = Mapping[str, Any]
Hashes = NDArray[np.uint64]  # [2, n], see `vit.data.duplicates`


class Likeness(NamedTuple):
    """Features by which unusual images are found (`vit.prediction.conformal`)."""

    # some of the training images, float16 [m, D], of length one
    training_features: NDArray[np.float16]
    # distances of held-out images to the k-th nearest of these, float32 [n]
    distances: NDArray[np.float32]


@dataclass(frozen=True)
class ModelFile:
    """The content of a model file.

    Attributes:
        weights: Tensors by name.
        metadata: The JSON object; empty in a file of another program.
        training_hashes: Hashes of pixels and dHashes of the training images.
        likeness: Features by which unusual images are found.
    """

    weights: StateDict
    metadata: Metadata = field(default_factory=dict)
    training_hashes: Hashes | None = None
    likeness: Likeness | None = None


def read_model_file(path: Path) -> ModelFile:
    """Read and check a model file, or another safetensors file. Raises ValueError for one that is
    cut off or damaged, or has NaN among its weights or another schema version."""
    # a file that may not be read is not a damaged one
    path.open("rb").close()
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY, "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not a complete model file ({first_line(error)}); copy or train it again"
        ) from error

    check_finite(tensors, origin=str(path))

    metadata = parse_json(text, origin=str(path))
    if metadata == {}:  # The file is from another program.
        return ModelFile(tensors)
    version = metadata.get("schema_version") if isinstance(metadata, dict) else None
    if version != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {version}, this program reads {SCHEMA_VERSION};"
            " upgrade vit-pipeline"
        )
    if metadata.pop(_CHECKSUM, None) != compute_checksum(tensors, metadata):
        raise ValueError(
            f"{path} is damaged: its content has another checksum than it records; copy or train it"
            " again"
        )
    if not all(isinstance(metadata.get(name), kind) for name, kind in _NEEDED.items()):
        raise ValueError(f"{path} is damaged: it lacks one of {', '.join(_NEEDED)}")
    # an argument of earlier versions, whose weights wouldn't fit
    metadata.get("architecture", {}).pop("distilled", None)
    hashes, likeness = (_take(tensors, names) for names in (_HASHES, _LIKENESS))
    return ModelFile(
        tensors,
        metadata,
        # safetensors has no unsigned integers: they are stored as signed ones of the same bits
        None if hashes is None else np.stack(hashes).view(np.uint64),
        likeness and Likeness(*likeness),
    )


def _take(tensors: StateDict, names: tuple[str, str]) -> tuple[Any, Any] | None:
    """Remove two arrays that `write_model_file` has put among the weights, and return them."""
    if names[0] not in tensors:
        return None
    first, second = (tensors.pop(name).numpy() for name in names)
    return first, second


def write_model_file(path: Path, content: ModelFile) -> None:
    """Write `content` atomically. Equal contents give equal bytes."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in content.weights.items()}
    if content.training_hashes is not None:
        for name, hashes in zip(_HASHES, content.training_hashes, strict=True):
            tensors[name] = torch.from_numpy(hashes.view(np.int64))
    if content.likeness is not None:
        for name, values in zip(_LIKENESS, content.likeness, strict=True):
            tensors[name] = torch.from_numpy(values)
    # the checksum is that of the values as JSON gives them back
    metadata = json.loads(json.dumps({**content.metadata, "schema_version": SCHEMA_VERSION}))
    metadata[_CHECKSUM] = compute_checksum(tensors, metadata)
    texts = {_KEY: json.dumps(metadata, sort_keys=True)}
    write_atomically(path, save(tensors, metadata=texts))


def hash_weights(weights: StateDict) -> str:
    """Return the SHA-256 of names and values, also of those of quantised modules: tuples, types,
    and tensors of integers with a scale."""
    digest = hashlib.sha256()
    for name, value in sorted(weights.items()):
        digest.update(name.encode())
        for part in value if isinstance(value, tuple) else [value]:
            if not isinstance(part, Tensor):
                digest.update(repr(part).encode())
                continue
            plain = part.dequantize() if part.is_quantized else part
            digest.update(plain.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def compute_checksum(tensors: StateDict, metadata: Metadata) -> str:
    """Return the SHA-256 of a file's content without the checksum itself."""
    shapes = {name: [str(tensor.dtype), list(tensor.shape)] for name, tensor in tensors.items()}
    content = json.dumps([hash_weights(tensors), shapes, metadata], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()


def check_finite(weights: StateDict, *, origin: str) -> None:
    """Raise ValueError for NaN and infinity, naming the first tensor that has any."""
    for name, tensor in weights.items():
        count = int((~tensor.isfinite()).sum())
        if count:
            raise ValueError(
                f"{origin}: {name} holds {count} NaN or infinite values; use an earlier copy"
            )
