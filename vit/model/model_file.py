"""The format of our model files: a safetensors file, with everything but tensors as one JSON object
in its metadata.

Nothing in a file is ever unpickled, and the JSON object is checked before anything is built from
it. Other safetensors files are read too: their metadata is empty.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, NamedTuple, get_type_hints

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, create_model
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from vit.model.checkpoint import CHECKPOINT_NAME, read_averaged_weights
from vit.model.find_file import MODEL_FILE as MODEL_FILE
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.arguments import MAX_SIDE
from vit.runtime.documents import check_schema, parse_json
from vit.runtime.files import explain_damage, open_regular, write_atomically

SCHEMA_VERSION = 3
_KEY = "vit"  # a single key: with several, safetensors writes them in random order
_CHECKSUM = "content_sha256"
_HASHES = ("training_hashes/digests", "training_hashes/perceptual")
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
_LIKENESS = ("likeness/training_features", "likeness/distances")

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
    """Weights by name, the JSON object (`_Schema`), the hashes of the training images (SHA-256
    digests and dHashes), and by what images unlike them are found."""

    weights: StateDict
    metadata: Metadata = field(default_factory=dict)
    training_hashes: Hashes | None = None
    likeness: Likeness | None = None


def read_model_file(path: Path) -> ModelFile:
    """Read and check a model file, another safetensors file, or a checkpoint of a run.

    Raises:
        ValueError: for a file that is cut off or damaged, has NaN among its weights, describes a
            model that can't be, or has another schema version.
        OSError: for one that isn't there or isn't a regular file.
    """
    open_regular(path).close()  # a pipe would never end
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
    try:
        if metadata.pop(_CHECKSUM, None) != compute_checksum(tensors, metadata):
            raise ValueError("its content has another checksum than it records")
        hashes = _take_hashes(tensors)
        likeness = _take_likeness(tensors)
        checked = check_metadata(metadata, origin="its metadata")
        _check_counts(checked, likeness)
        _check_operating_point(checked)
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}; copy or train it again") from error
    return ModelFile(tensors, checked, hashes, likeness)


def _take_hashes(tensors: StateDict) -> Hashes | None:
    """Remove the hashes that `write_model_file` has put among the weights, and return them."""
    # safetensors has no unsigned integers: they are stored as signed ones of the same bits
    parts = [tensors.pop(name) for name in _HASHES if name in tensors]
    if not parts:
        return None
    if {(part.dtype, part.ndim) for part in parts} != {(torch.int64, 1)}:
        raise ValueError("the hashes of its training images are not whole numbers")
    if len(parts) < 2 or len(parts[0]) != len(parts[1]):
        raise ValueError("the hashes of its training images are not pairs")
    digests, perceptual = (part.numpy().view(np.uint64) for part in parts)
    return digests, perceptual


def _take_likeness(tensors: StateDict) -> Likeness | None:
    """Remove the values that `write_model_file` has put among the weights, and return them."""
    parts = [tensors.pop(name) for name in _LIKENESS if name in tensors]
    if not parts:
        return None
    kinds = [(part.dtype, part.ndim, len(part) > 0) for part in parts]
    if kinds != [(torch.float16, 2, True), (torch.float32, 1, True)]:
        raise ValueError("its features of training images are not a table")
    likeness = Likeness(*(part.numpy() for part in parts))
    check_likeness(likeness)
    return likeness


def check_likeness(likeness: Likeness) -> None:
    """Raise ValueError for features that aren't of length one, and for impossible distances."""
    lengths = np.linalg.norm(likeness.training_features.astype(np.float32), axis=1)
    is_unit = np.abs(lengths - 1) < 0.01
    # a model may have no feature of an image
    if not is_unit.any() or not (is_unit | (lengths == 0)).all():
        raise ValueError(
            "the features of training images must be of length 1, and these are"
            f" {lengths.min():.3g} to {lengths.max():.3g} long"
        )
    distances = likeness.distances
    # two vectors of length one, rounded, are at most this far apart
    if not ((distances >= 0) & (distances <= 2.01)).all():
        raise ValueError(
            "the distances of images must be from 0 to 2, and these are"
            f" {distances.min():.3g} to {distances.max():.3g}"
        )


def _check_counts(metadata: Metadata, likeness: Likeness | None) -> None:
    """Raise ValueError if the metadata describes other features than the file holds."""
    recorded = metadata.get("conformal") or {}
    names = recorded.get("training_images", [])
    stated = [recorded.get(f"num_{name}", 0) for name in ("training_features", "distances")]
    held = [0, 0] if likeness is None else [len(part) for part in likeness]
    if stated != held or (names and len(names) != held[0]):
        raise ValueError(
            f"it describes {stated[0]:,} features of training images, {len(names):,} names and"
            f" {stated[1]:,} distances, and holds {held[0]:,} features and {held[1]:,} distances"
        )
    num_classes = len(metadata["class_names"])
    largest = max((index for _, index in names), default=0)
    if largest >= num_classes:
        raise ValueError(
            f"a training image has class {largest}, and there are {num_classes} classes"
        )


def _check_operating_point(metadata: Metadata) -> None:
    """Raise ValueError for thresholds of classes that the model doesn't have, or for several classes
    where an image has one."""
    thresholds = (metadata.get("operating_point") or {}).get("thresholds", {})
    unknown = sorted(set(thresholds) - set(metadata["class_names"]))
    if unknown:
        raise ValueError(f"its operating point has a threshold of {unknown[0]!r}, an unknown class")
    if len(thresholds) > 1 and metadata["data"].get("task") != "multilabel":
        raise ValueError(
            f"its operating point has thresholds of {len(thresholds)} classes, and an image has one"
        )


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

    def add(value: object) -> None:
        if isinstance(value, tuple):
            for part in value:
                add(part)
        elif not isinstance(value, Tensor):
            digest.update(repr(value).encode())
        elif value.is_quantized:
            add(value.dequantize())
        else:
            digest.update(value.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)

    for name, value in sorted(weights.items()):
        digest.update(name.encode())
        add(value)
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


def check_metadata(metadata: Metadata, *, origin: str) -> Metadata:
    """Return the values in their types. Raise ValueError that names the first wrong one."""
    schema = _ModuleSchema if "module" in metadata else _VisionTransformerSchema
    checked = check_schema(schema, metadata, origin=origin)
    return {**metadata, **checked.model_dump(exclude_unset=True)}


_Side = Annotated[int, Field(ge=1, le=MAX_SIDE)]
_Sides = tuple[_Side, _Side]


class _Values(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class _Preprocess(_Values):
    """The arguments of a `Preprocess`."""

    image_size: _Sides
    crop_pct: float
    mean: tuple[float, float, float]
    std: tuple[float, float, float]
    interpolation: str
    value_range: tuple[float, float] | None = None
    resize_mode: str = "crop"


class _Data(BaseModel):
    """The recorded images of the training, as far as `vit.data.open.open_for_model` reads it."""

    model_config = ConfigDict(coerce_numbers_to_str=True, allow_inf_nan=False, extra="allow")
    name: str = ""
    root: str | None = None
    label_by: str | None = None
    path_column: str | None = None
    label_column: str | None = None
    classes: list[str] | None = None
    class_names: str | dict[str, str] | None = None
    corrections: str | dict[str, str] | None = None
    test_fraction: float = Field(0.2, ge=0, lt=1)
    validation_fraction: float = Field(0.1, ge=0, lt=1)
    split_seed: int = 0
    group_by: Annotated[int, Field(ge=1)] | str | None = None
    group_duplicates: bool = False
    allow_outside: bool = False
    cache_dir: str | None = None


class _Train(BaseModel):
    model_config = ConfigDict(extra="allow")
    seed: int | None = None


class _Config(BaseModel):
    """The recorded configuration: sections that are read, and the others."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, dict[str, Any]]
    data: _Data | None = None
    train: _Train | None = None


class _Conformal(BaseModel):
    """Thresholds of prediction sets and their images (`vit.prediction.conformal`)."""

    model_config = ConfigDict(allow_inf_nan=False)
    num_images: int = Field(ge=0)
    # coverage → the least probability that puts a class into the set
    thresholds: dict[
        Annotated[str, Field(pattern=r"^0\.\d+$")], Annotated[float, Field(ge=0, le=1)]
    ]
    num_training_features: int = Field(0, ge=0)
    num_distances: int = Field(0, ge=0)
    # name of the image and index of the class, for each training feature
    # -1: the image may have several labels
    training_images: list[tuple[str, Annotated[int, Field(ge=-1)]]] = []
    # why there are none of these; empty where there are
    no_likeness: str = ""


class TemperatureFit(BaseModel):
    """A temperature, and its effect on images that it was not fitted on.

    `helps` is true if the loss falls by more than noise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    temperature: float = Field(gt=0)
    num_images: int = Field(ge=0)
    loss_before: float = Field(ge=0)
    loss_after: float = Field(ge=0)
    ece_before: float = Field(ge=0, le=1)
    ece_after: float = Field(ge=0, le=1)
    helps: bool


class OperatingPoint(BaseModel):
    """Probabilities from which classes or labels are predicted (`vit.prediction.decision`)."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    # the rule they were chosen by, as `vit evaluate --operating-point` takes it
    rule: str
    # label → probability; one class alone where an image has one class
    thresholds: dict[str, Annotated[float, Field(ge=0, le=1)]] = Field(min_length=1)
    # images they were chosen on
    num_images: int = Field(ge=0)


class _Record(BaseModel):
    """Names and fingerprints of the training images, for each split and in total."""

    model_config = ConfigDict(extra="allow")
    fingerprint: str | None = None
    splits: dict[str, dict[str, Any]] = {}


class _Schema(BaseModel):
    """The JSON object of every model file."""

    preprocess: _Preprocess
    class_names: list[str] = Field(min_length=1)
    config: _Config
    data: _Record
    versions: dict[str, str] = {}
    temperature: float = Field(1.0, gt=0, allow_inf_nan=False)
    temperature_fitted_on: dict[str, str | int | float] = {}
    out_of_fold_temperature: TemperatureFit | None = None
    conformal: _Conformal = _Conformal(num_images=0, thresholds={})
    operating_point: OperatingPoint | None = None
    run_id: str | None = None
    # step of the run after which the weights were taken
    step: Annotated[int, Field(ge=0)] | None = None
    # Models that come with the package record their accuracy with its interval, and their limits.
    evaluation: dict[str, str | int | float] = {}
    limits: str = ""


# Limits of the arguments of a VisionTransformer: without them a small file could ask for days of
# work. Which values fit together, the model says itself.
_LIMITS = {
    "img_size": _Sides,
    "patch_size": _Sides,
    "in_chans": Annotated[int, Field(ge=1, le=64)],
    "num_classes": Annotated[int, Field(ge=0, le=2**20)],
    "embed_dim": Annotated[int, Field(ge=1, le=2**16)],
    "depth": Annotated[int, Field(ge=1, le=1000)],
    "num_heads": Annotated[int, Field(ge=1, le=2**16)],
    "reg_tokens": Annotated[int, Field(ge=0, le=8)],
    "mlp_ratio": Annotated[float, Field(gt=0, le=64)],
    "drop_path_rate": Annotated[float, Field(ge=0, lt=1)],
}
_TYPES = get_type_hints(VisionTransformer.__init__) | _LIMITS
_TYPES.pop("return")
_FIELDS: Any = {name: (type_, ...) for name, type_ in _TYPES.items()}
_Architecture = create_model("_Architecture", __base__=_Values, **_FIELDS)


class _VisionTransformerSchema(_Schema):
    architecture: _Architecture


class _Module(_Values):
    """A module that isn't ours: its class, and under which name timm builds it again for images of
    which size, if it does."""

    name: str
    timm: str | None = None
    img_size: _Sides | None = None


class _ModuleSchema(_Schema):
    module: _Module
