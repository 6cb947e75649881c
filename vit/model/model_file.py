"""The format of our model files: a safetensors file, with everything but tensors as one JSON object
in its metadata.

Nothing in a file is ever unpickled. A checksum tells damage; what the JSON object describes is
checked where it is built (`vit.model.weights.build_to_fit`). Other safetensors files are read too:
their metadata is empty.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vit.model.checkpoint import CHECKPOINT_NAME, read_averaged_weights
from vit.model.find_file import MODEL_FILE as MODEL_FILE
from vit.runtime.documents import parse_json
from vit.runtime.files import explain_damage, write_atomically

SCHEMA_VERSION = 3
_KEY = "vit"  # a single key: with several, safetensors writes them in random order
_CHECKSUM = "content_sha256"
_NEEDED = {"class_names": list, "config": dict, "data": dict, "preprocess": dict}
# arrays that are kept among the weights
_HASHES = ("training_hashes/digests", "training_hashes/perceptual")
_LIKENESS = ("likeness/training_features", "likeness/distances")
# the distance is that to the k-th nearest training image (Sun et al. 2022, section 3)
NUM_NEIGHBOURS = 5
# the metadata that a checkpoint of the same run doesn't share
_FITTED_TO_WEIGHTS = (
    "step",
    "temperature",
    "temperature_fitted_on",
    "out_of_fold_temperature",
    "conformal",
    "operating_point",
)

StateDict = dict[str, Tensor]
Metadata = Mapping[str, Any]
Hashes = tuple[NDArray[np.uint64], NDArray[np.uint64]]


class Likeness(NamedTuple):
    """Features by which unusual images are found (`vit.prediction.conformal`)."""

    # some of the training images, float16 [m, D], of length one
    training_features: NDArray[np.float16]
    # distances of held-out images to the k-th nearest of these, float32 [n]
    distances: NDArray[np.float32]


@dataclass(frozen=True)
class ModelFile:
    """Weights by name, the JSON object, the hashes of the training images (SHA-256 digests and
    dHashes), and by what images unlike them are found."""

    weights: StateDict
    metadata: Metadata = field(default_factory=dict)
    training_hashes: Hashes | None = None
    likeness: Likeness | None = None


def read_model_file(path: Path) -> ModelFile:
    """Read and check a model file, another safetensors file, or a checkpoint of a run.

    Raises:
        ValueError: The file is cut off or damaged, has NaN among its weights, or has another schema
            version.
        OSError: It isn't there.
    """
    # a file that may not be read is not a damaged one
    path.open("rb").close()
    if CHECKPOINT_NAME.fullmatch(path.name):
        return _read_checkpoint(path)
    try:
        with safe_open(path, framework="pt") as file:
            text = (file.metadata() or {}).get(_KEY, "{}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError, ValueError, RuntimeError) as error:
        raise ValueError(
            f"{path} is not a complete model file ({explain_damage(path, error)}); "
            "copy or train it again"
        ) from error

    check_finite(tensors, origin=str(path))

    metadata = parse_json(text, origin=str(path))
    if metadata == {}:  # The file is from another program.
        return ModelFile(tensors)
    if not isinstance(metadata, dict) or not isinstance(metadata.get("schema_version"), int):
        raise ValueError(f"{path} is damaged: its metadata is not an object with a schema_version")
    if metadata["schema_version"] != SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {metadata['schema_version']}, "
            f"this program reads {SCHEMA_VERSION}; upgrade vit-pipeline"
        )
    if metadata.pop(_CHECKSUM, None) != compute_checksum(tensors, metadata):
        raise ValueError(
            f"{path} is damaged: its content has another checksum than it records; copy or train it"
            " again"
        )
    described = "module" if "module" in metadata else "architecture"
    kinds = {**_NEEDED, described: dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(metadata.get(name), kind)]
    temperature = metadata.get("temperature", 1.0)
    if not isinstance(temperature, int | float) or not 0 < temperature < math.inf:
        wrong.append("temperature")
    if wrong:
        raise ValueError(f"{path} is damaged: its {wrong[0]} is wrong; copy or train it again")
    if metadata.get("architecture", {}).pop("distilled", False):
        raise ValueError(
            f"{path} is a distilled model, which vit has no more; train one again, or use it with"
            " vit-pipeline 0.2"
        )
    hashes, likeness = (_take(tensors, names) for names in (_HASHES, _LIKENESS))
    return ModelFile(
        tensors,
        metadata,
        # safetensors has no unsigned integers: they are stored as signed ones of the same bits
        hashes and tuple(part.view(np.uint64) for part in hashes),
        likeness and Likeness(*likeness),
    )


def _take(tensors: StateDict, names: tuple[str, str]) -> tuple[Any, Any] | None:
    """Remove two arrays that `write_model_file` has put among the weights, and return them."""
    if names[0] not in tensors:
        return None
    first, second = (tensors.pop(name).numpy() for name in names)
    return first, second


def _read_checkpoint(path: Path) -> ModelFile:
    """Read the averaged weights of a checkpoint, with the metadata of its run's model file."""
    model_file = path.absolute().parents[1] / MODEL_FILE
    if not model_file.is_file():
        raise ValueError(
            f"{path} is the checkpoint of a run whose {MODEL_FILE}, from its first evaluation, is "
            f"not in {model_file.parent}; leave checkpoints in their run's directory"
        )
    content = read_model_file(model_file)

    weights, run_id = read_averaged_weights(path)
    if run_id != content.metadata.get("run_id"):
        raise ValueError(f"{path} is of run {run_id}, and {model_file} of another")
    check_finite(weights, origin=str(path))

    # These were fitted to the weights of the model file.
    metadata = {
        key: value for key, value in content.metadata.items() if key not in _FITTED_TO_WEIGHTS
    }
    return ModelFile(weights, metadata, content.training_hashes)


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
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=texts))


def hash_weights(weights: StateDict) -> str:
    """Return the SHA-256 of names and values. Quantised modules have tuples and types among their
    values, and tensors of integers with a scale."""
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
        # few operations are defined for numbers of 8 bits
        if tensor.is_floating_point() and tensor.element_size() == 1:
            raise ValueError(f"{origin}: {name} is {tensor.dtype}; convert it to float32")
        count = int((~tensor.isfinite()).sum())
        if count:
            raise ValueError(
                f"{origin}: {name} holds {count} NaN or infinite values; use an earlier copy"
            )


class OperatingPoint(BaseModel):
    """Probabilities from which classes or labels are predicted (`vit.prediction.decision`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # the rule they were chosen by, as `vit evaluate --operating-point` takes it
    rule: str
    # label → probability; one class alone where an image has one class
    thresholds: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1)
    # images they were chosen on
    num_images: int = Field(ge=0)
