"""The self-sufficient model file: one safetensors file that needs nothing else.

It holds the weights and, as JSON in its metadata, the architecture, class names, preprocessing, the resolved
configuration, the fingerprint of the data and the library versions. Nothing in it is ever unpickled.
"""

import dataclasses
import hashlib
import json
import platform
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import vit
from vit.config import rename_old_keys
from vit.data.images import Preprocess
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import check_finite, load_state, rename_arguments
from vit.runtime.files import compute_sha256, write_atomically

SCHEMA_VERSION = 1
MODEL_FILE = "model.safetensors"
_METADATA_KEY = "vit"  # a single key: with several, safetensors writes them in random order
_HASHES = ("training_hashes/digests", "training_hashes/perceptual")
_LIBRARIES = ("torch", "torchvision", "timm", "numpy", "safetensors")

Hashes = tuple[NDArray[np.uint64], NDArray[np.uint64]]


@dataclass(frozen=True)
class Bundle:
    """A model in evaluation mode with all that is needed to use it."""

    model: nn.Module
    preprocess: Preprocess
    class_names: tuple[str, ...]
    name: str
    sha256: str
    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    training_hashes: Hashes | None = None

    @property
    def temperature(self) -> float:
        """What the logits are divided by before the softmax; 1 unless it was fitted on validation images."""
        return float(self.metadata.get("temperature", 1.0))


def collect_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a figure depends on."""
    return {
        "vit": vit.__version__,
        "python": platform.python_version(),
        **{name: version(name) for name in _LIBRARIES},
    }


def save_bundle(
    path: Path,
    model: VisionTransformer,
    *,
    preprocess: Preprocess,
    class_names: tuple[str, ...],
    config: dict[str, Any],
    data: dict[str, Any],
    weights: dict[str, Tensor] | None = None,
    training_hashes: Hashes | None = None,
    extra: dict[str, Any] | None = None,
) -> None:
    """Write `model` and its metadata to `path`, atomically. Equal inputs give equal bytes.

    `weights` stand for the model's own where those are spread over processes.
    """
    if len(class_names) != model.num_classes:
        raise ValueError(f"{len(class_names)} class names for a model of {model.num_classes} classes")
    metadata = {
        "schema_version": SCHEMA_VERSION,
        "architecture": model.architecture,
        "class_names": list(class_names),
        "preprocess": preprocess.to_dict(),
        "config": config,
        "data": data,
        "versions": collect_versions(),
        **(extra or {}),
    }
    tensors = {
        name: tensor.detach().cpu().contiguous() for name, tensor in (weights or model.state_dict()).items()
    }
    if training_hashes is not None:
        tensors |= {
            name: torch.from_numpy(hashes.view(np.int64))
            for name, hashes in zip(_HASHES, training_hashes, strict=True)
        }
    _write(path, tensors, metadata)


def update_metadata(path: Path, **values: Any) -> None:
    """Set metadata values (a fitted temperature, say) in the model file at `path`, atomically."""
    tensors, metadata = _read(path)
    _write(path, tensors, metadata | values)


def load_bundle(
    source: str | Path, *, device: str | torch.device = "cpu", random_weights: bool = False
) -> Bundle:
    """Load a `model.safetensors`, the best model of a training directory, or `timm:NAME`.

    `random_weights` keeps the architecture and draws fresh weights (seed 0): the control of a sanity check.
    Raises FileNotFoundError or ValueError with what is wrong with the file.
    """
    if str(source).startswith("timm:"):
        return _load_timm_bundle(str(source), device=device, random_weights=random_weights)
    path = _find_model_file(Path(source))
    tensors, metadata = _read(path)
    hashes = [tensors.pop(name).numpy().view(np.uint64) for name in _HASHES if name in tensors]
    check_finite(tensors, origin=str(path))
    # construction draws random weights: keep that from moving the caller's random numbers
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = VisionTransformer(**metadata["architecture"])
    if not random_weights:
        load_state(model, tensors, origin=str(path))
    return Bundle(
        model=model.eval().to(device),
        preprocess=Preprocess.from_dict(metadata["preprocess"]),
        class_names=tuple(metadata["class_names"]),
        name=str(source),
        sha256=compute_sha256(path),
        config=rename_old_keys(metadata["config"]),
        data=metadata["data"],
        metadata=metadata,
        training_hashes=(hashes[0], hashes[1]) if len(hashes) == 2 else None,
    )


def _find_model_file(path: Path) -> Path:
    if path.is_dir():
        if not (path / MODEL_FILE).is_file():
            raise FileNotFoundError(
                f"{path} holds no {MODEL_FILE}; has its training reached a first evaluation?"
            )
        return path / MODEL_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{path} does not exist; MODEL is a {MODEL_FILE}, a training directory or timm:NAME"
        )
    return path


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors and metadata of a model file, or a ValueError that says why it is none."""
    try:
        with safe_open(path, framework="pt") as file:
            raw = (file.metadata() or {}).get(_METADATA_KEY)
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (not a dict)
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path} is not a whole model file ({error}); copy or train it again") from error
    if raw is None:
        raise ValueError(
            f"{path} holds weights without our metadata; weights of timm load with vit.load_timm({str(path)!r})"
        )
    metadata = json.loads(raw)
    rename_arguments(metadata["architecture"])
    if metadata["schema_version"] > SCHEMA_VERSION:
        raise ValueError(
            f"{path} has schema version {metadata['schema_version']}, this program reads up to {SCHEMA_VERSION}; "
            "upgrade vit-pipeline"
        )
    return tensors, metadata


def _write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, Any]) -> None:
    text = {_METADATA_KEY: json.dumps(metadata, sort_keys=True)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata=text))


def _load_timm_bundle(source: str, *, device: str | torch.device, random_weights: bool) -> Bundle:
    """A timm model, unmodified, with timm's preprocessing and ImageNet's class names."""
    from vit.model.timm_weights import create_timm

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model, preprocess, class_names = create_timm(
            source.removeprefix("timm:"), pretrained=not random_weights
        )
    return Bundle(
        model=model.eval().to(device),
        preprocess=Preprocess.from_dict(preprocess),
        class_names=tuple(class_names),
        name=source,
        sha256=_hash_weights(model),
        metadata={"preprocess": preprocess, "versions": collect_versions()},
    )


def _hash_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def describe(bundle: Bundle) -> dict[str, Any]:
    """The facts `vit info MODEL` shows."""
    return {
        "parameters": sum(parameter.numel() for parameter in bundle.model.parameters()),
        "classes": list(bundle.class_names),
        "preprocess": dataclasses.asdict(bundle.preprocess),
        "data": bundle.data,
        "sha256": bundle.sha256,
        **{key: bundle.metadata.get(key) for key in ("architecture", "versions")},
    }
