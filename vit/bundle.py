"""A model with all that is needed to use it, from one self-sufficient file, timm, or a module of another library."""

import dataclasses
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn

from vit.data.images import Preprocess
from vit.model.families import count_classes, find_class_names, find_preprocess
from vit.model.metadata import build_outline
from vit.model.model_file import MODEL_FILE as MODEL_FILE
from vit.model.model_file import Hashes, ModelFile, hash_weights, read_model_file, write_model_file
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import check_fit, load_weights
from vit.runtime.files import compute_sha256
from vit.runtime.version import __version__

Device = str | torch.device


@dataclass(frozen=True)
class Bundle:
    """A model in evaluation mode with its preprocessing and class names, and what its file records of its training:
    configuration, data, versions and the hashes of the training images."""

    model: nn.Module
    preprocess: Preprocess
    class_names: tuple[str, ...]
    name: str
    sha256: str
    config: dict[str, Any] = field(default_factory=dict)
    data: dict[str, Any] = field(default_factory=dict)
    metadata: dict[str, Any] = field(default_factory=dict)
    training_hashes: Hashes | None = None

    @classmethod
    def from_model(
        cls, model: nn.Module, *, class_names: Sequence[str] | None = None, preprocess: Preprocess | None = None
    ) -> Self:
        """Wrap a model of this project, timm, torchvision or Hugging Face; not copied, but put into evaluation mode.
        What is not given is found as `vit.model.families` describes; otherwise class names are "class 0" and so on, and
        the normalisation is ImageNet's. Raises ValueError for another number of class names than of logits, and where
        something that is not given can't be found."""
        names = find_class_names(model) if class_names is None else tuple(class_names)
        _check_class_names(names, count_classes(model))
        preprocess = preprocess or Preprocess.from_dict(find_preprocess(model))
        metadata = {"preprocess": preprocess.to_dict(), "versions": collect_versions()}
        if isinstance(model, VisionTransformer):
            metadata["architecture"] = model.architecture
        digest = hash_weights(model.state_dict())
        return cls(model.eval(), preprocess, names, type(model).__name__, digest, metadata=metadata)

    @property
    def temperature(self) -> float:
        """What the logits are divided by before the softmax; 1 unless it was fitted on validation images."""
        return float(self.metadata.get("temperature", 1.0))


def load_model(
    model: str | Path | Bundle | nn.Module, *, device: Device = "cpu", random_weights: bool = False
) -> Bundle:
    """A bundle on `device` of whatever names or is a model: a bundle, a module (`Bundle.from_model`), or what
    `load_bundle` reads. Bundles and modules are moved, not copied."""
    if isinstance(model, str | Path):
        return load_bundle(model, device=device, random_weights=random_weights)
    if random_weights:
        raise ValueError("random_weights needs a model file, a training directory or timm:NAME")
    if isinstance(model, nn.Module):
        return Bundle.from_model(model.to(device))
    model.model.to(device)
    return model


@torch.random.fork_rng(devices=[])  # building a model draws random weights; the caller's random numbers don't move
def load_bundle(
    source: str | Path, *, model: nn.Module | None = None, device: Device = "cpu", random_weights: bool = False
) -> Bundle:
    """Load a `model.safetensors`, the best model of a training directory, or `timm:NAME`. `model`: the module that
    takes the weights, needed where `vit.train` was given one that is neither ours nor built by timm from its name
    alone. `random_weights` keeps the architecture and draws new weights (seed 0), for sanity checks. Raises
    FileNotFoundError or ValueError with what is wrong with the file."""
    torch.manual_seed(0)
    if str(source).startswith("timm:"):
        from vit.model.timm_weights import create_timm

        module = create_timm(str(source).removeprefix("timm:"), pretrained=not random_weights)
        return dataclasses.replace(Bundle.from_model(module.to(device)), name=str(source))
    path = Path(source)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist; MODEL is a {MODEL_FILE}, a training directory or timm:NAME")
    path = path / MODEL_FILE if path.is_dir() else path
    if not path.is_file():
        raise FileNotFoundError(f"{source} holds no {MODEL_FILE}; has its training reached a first evaluation?")
    content = read_model_file(path)
    metadata = content.metadata
    if not metadata:
        cure = f"weights of timm load with vit.load_timm({str(path)!r})"
        raise ValueError(f"{path} holds weights without our metadata; {cure}")
    preprocess, names = Preprocess.from_dict(metadata["preprocess"]), tuple(metadata["class_names"])
    module = _build(metadata, content.weights, origin=str(path)) if model is None else model
    if not random_weights:
        load_weights(module, content.weights, origin=str(path))
    recorded: dict[str, Any] = {"config": metadata["config"], "data": metadata["data"], "metadata": metadata}
    recorded["training_hashes"] = content.training_hashes
    return Bundle(module.eval().to(device), preprocess, names, str(source), compute_sha256(path), **recorded)


def _build(metadata: dict[str, Any], weights: dict[str, Tensor], *, origin: str) -> nn.Module:
    """The module that the metadata describe, when its tensors are known to be those that are there."""
    if "module" in metadata:
        from vit.model.timm_weights import build_module

        described: dict[str, Any] = {"values": metadata["module"], "num_classes": len(metadata["class_names"])}
        check_fit(build_module(**described, device="meta"), weights, origin=origin)
        return build_module(**described)
    check_fit(build_outline(metadata["architecture"], origin=origin), weights, origin=origin)
    _check_class_names(metadata["class_names"], metadata["architecture"]["num_classes"])
    return VisionTransformer(**metadata["architecture"])


def save_bundle(
    path: Path,
    model: nn.Module,
    *,
    preprocess: Preprocess,
    class_names: tuple[str, ...],
    config: dict[str, Any],
    data: dict[str, Any],
    weights: dict[str, Tensor] | None = None,
    training_hashes: Hashes | None = None,
    run_id: str | None = None,
) -> None:
    """Write `model` and its metadata to `path`, atomically. Equal inputs give equal bytes. `weights` replace the
    model's own where those are sharded over processes."""
    if isinstance(model, VisionTransformer):
        _check_class_names(class_names, model.num_classes)
        described: dict[str, Any] = {"architecture": model.architecture}
    else:
        from vit.model.timm_weights import describe_module

        sizes: dict[str, Any] = {"num_classes": len(class_names), "img_size": preprocess.image_size}
        described = {"module": describe_module(model, **sizes)}
    metadata = {"run_id": run_id, **described, "class_names": list(class_names), "config": config, "data": data}
    metadata |= {"preprocess": preprocess.to_dict(), "versions": collect_versions()}
    write_model_file(path, ModelFile(weights or model.state_dict(), metadata, training_hashes))


def update_metadata(path: Path, **values: Any) -> None:
    """Set metadata values (a fitted temperature, say) in the model file at `path`, atomically."""
    content = read_model_file(path)
    write_model_file(path, dataclasses.replace(content, metadata=content.metadata | values))


def collect_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that a result depends on."""
    libraries = {name: version(name) for name in ("torch", "torchvision", "timm", "numpy", "safetensors")}
    return {"vit": __version__, "python": platform.python_version(), **libraries}


def describe(bundle: Bundle) -> dict[str, Any]:
    """The facts `vit info MODEL` shows."""
    facts: dict[str, Any] = {"parameters": sum(parameter.numel() for parameter in bundle.model.parameters())}
    facts |= {"classes": list(bundle.class_names), "preprocess": dataclasses.asdict(bundle.preprocess)}
    facts |= {"data": bundle.data, "sha256": bundle.sha256}
    return facts | {key: bundle.metadata.get(key) for key in ("architecture", "module", "versions")}


def _check_class_names(names: Sequence[str], count: int | None) -> None:
    if count is not None and len(names) != count:
        raise ValueError(f"{len(names)} class names for a model of {count} classes")
