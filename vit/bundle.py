"""Load a model with all that is needed to use it: from a file, timm, or a module of another
library."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn

from vit.data.preprocess import Preprocess
from vit.data.splits import DatasetSplits
from vit.model.averaged_model import AveragedModel
from vit.model.find_file import find_model
from vit.model.logits import count_features
from vit.model.model_file import Hashes, Likeness, ModelFile, hash_weights, write_model_file
from vit.model.model_info import (
    count_classes,
    find_class_names,
    find_preprocess,
    find_problem_type,
    keep_mode,
    unwrap_model,
)
from vit.model.modules import (
    OpenedModel,
    build,
    check_class_names,
    describe,
    load_into,
    open_folder,
)
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import read_weights
from vit.runtime.arguments import check_kind, shorten
from vit.runtime.device import choose_device
from vit.runtime.files import compute_sha256, expand_home
from vit.runtime.memory import keep_freed_memory
from vit.runtime.version import collect_versions

# value of "task" in the data of a model file
MULTILABEL = "multilabel"
Values = Mapping[str, Any]  # values that JSON can hold
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True, repr=False)
class Bundle:
    """A model in evaluation mode with its preprocessing, its class names, and what its file tells
    about its training.

    Attributes:
        model: From normalised images [B, 3, height, width] to logits [B, classes].
        preprocess: Preprocessing from images of any size to the model's input.
        class_names: Name of each logit's class.
        name: Path or name that was loaded, or the name of the model's class.
        sha256: Digest of the file, or of the weights if there is no file.
        config: Configuration of its training.
        data: Training data: name, splits, fingerprints.
        metadata: All metadata of its file.
        training_hashes: Hashes of pixels and dHashes of the training images.
        likeness: Features by which images are compared with the training images.
        passed_images: Images that `vit.train` got from Python.

    Example:
        >>> bundle = vit.Bundle.from_model(timm_model, class_names=("cat", "dog"))
        >>> vit.explain(bundle, "photos")
    """

    model: nn.Module
    preprocess: Preprocess
    class_names: tuple[str, ...]
    name: str
    sha256: str
    config: Values = field(default_factory=dict)
    data: Values = field(default_factory=dict)
    metadata: Values = field(default_factory=dict)
    training_hashes: Hashes | None = None
    likeness: Likeness | None = None
    passed_images: DatasetSplits | None = None

    @classmethod
    def from_model(
        cls,
        model: nn.Module,
        *,
        class_names: Sequence[str] | None = None,
        preprocess: Preprocess | None = None,
    ) -> Self:
        """Wrap a module of this project, timm, torchvision, Hugging Face or your own.

        Args:
            model: The module, which is not copied, but put into evaluation mode. Wrappers of
                torch.compile, DistributedDataParallel and peft are taken off.
            class_names: Name of each class. None: the model's own, otherwise "class 0" and so on.
            preprocess: Preprocessing of images. None: that of the model's library, otherwise
                ImageNet's normalisation.

        Raises:
            ValueError: The number of names isn't that of logits, or the image size is unknown.
        """
        model = unwrap_model(model)
        names = find_class_names(model) if class_names is None else tuple(class_names)
        check_class_names(names, count_classes(model))
        if preprocess is None:
            preprocess = Preprocess.from_dict(find_preprocess(model))
        data = {}
        if find_problem_type(model) == "multi_label_classification":
            data["task"] = MULTILABEL
        return cls(
            model=model.eval(),
            preprocess=preprocess,
            class_names=names,
            name=type(model).__name__,
            sha256=hash_weights(model.state_dict()),
            data=data,
        )

    def save(self, path: str | Path) -> None:
        """Write a model file, such as "model.safetensors", which every command and function opens.

        Raises:
            ValueError: The model is neither this project's nor timm's, so no file rebuilds it.
        """
        content = self.to_file()
        if "timm" not in content.metadata.get("module", {"timm": ""}):
            kind = type(self.model).__name__
            raise ValueError(
                f"{kind} can't be built again from a file; save its state_dict, and open that with"
                " vit.load_bundle(path, model=…)"
            )
        write_model_file(expand_home(path), content)

    def to_file(self, weights: dict[str, Tensor] | None = None) -> ModelFile:
        """Return the content of a model file. Without `weights`, it has the model's own tensors."""
        if isinstance(self.model, VisionTransformer):
            check_class_names(self.class_names, self.model.num_classes)
        metadata = {
            "run_id": None,
            "step": None,
            "versions": collect_versions(),
            **self.metadata,
            **describe(self.model, num_classes=len(self.class_names)),
            "class_names": list(self.class_names),
            "config": self.config,
            "data": self.data,
            "preprocess": self.preprocess.to_dict(),
        }
        return ModelFile(
            weights or self.model.state_dict(), metadata, self.training_hashes, self.likeness
        )

    @property
    def device(self) -> torch.device:
        """The device of the weights."""
        return next(self.model.parameters()).device

    @property
    def recorded_images(self) -> dict[str, Any]:
        """The record of its training images in its file: the section `data` of its configuration, the
        ids of each held-out split (held_out), and the number of the others (num_trained_on)."""
        facts = ("task", "held_out", "num_trained_on")
        known = {key: self.data[key] for key in facts if self.data.get(key) is not None}
        return {**self.config.get("data", {}), **known}

    @property
    def is_multilabel(self) -> bool:
        """True if an image may have several labels, each with the sigmoid of its logit."""
        return self.data.get("task") == MULTILABEL

    @property
    def temperature(self) -> float:
        """Divisor of the logits, fitted on validation images; 1 without them."""
        return float(self.metadata.get("temperature", 1.0))

    @property
    def operating_point(self) -> Values:
        """Thresholds that decide what is predicted, and the rule they were chosen by
        (`vit.prediction.decision`); empty without one."""
        return self.metadata.get("operating_point") or {}


ModelLike = str | Path | Bundle | nn.Module
Models = ModelLike | Sequence[ModelLike]


def require_classifier(bundle: Bundle) -> None:
    """Raise ValueError for a model that has features only, or whose classes are unknown."""
    if not bundle.class_names:
        raise ValueError(
            f"{bundle.name} has no classifier; use vit.embed for its features, or train one with vit"
            " train PHOTOS --init; if it has one, give class_names=…"
        )


def keeps_mode(function: Function) -> Function:
    """Decorate a public function of a model, or of a list of them: afterwards, a user's module is in
    the training or evaluation mode that it was in before."""

    @wraps(function)
    def run(model: ModelLike, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for each in model if isinstance(model, list | tuple) else [model]:
                stack.enter_context(keep_mode(each.model if isinstance(each, Bundle) else each))
            return function(model, *args, **kwargs)

    return cast(Function, run)


def open_model(
    model: Models,
    *,
    device: str = "auto",
    class_names: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
) -> Bundle:
    """Return the bundle of a model in any form, or of several, whose probabilities it averages.

    A bundle or module is moved to the device, not copied; "auto" leaves it where it is, and takes a
    GPU for anything else if there is one. Class names and preprocessing are for a module, or for
    weights that have none. See `load_bundle` and `Bundle.from_model` for errors.
    """
    told: Any = {"class_names": class_names, "preprocess": preprocess}
    if isinstance(model, list | tuple):
        return _average([open_model(each, device=device, **told) for each in model])
    # Batches of different sizes would otherwise return memory and fetch it again.
    keep_freed_memory()
    torch_device = choose_device(device)
    if isinstance(model, str | Path):
        return load_bundle(model, device=torch_device, **told)
    if isinstance(model, Bundle):
        if class_names is not None or preprocess is not None:
            raise ValueError("class_names and preprocess describe a module; a Bundle has its own")
        bundle = model
    else:
        expected = "a path, timm:NAME, a Bundle or an nn.Module; pass the .bundle of a run"
        check_kind(model, nn.Module, name="model", expected=expected)
        bundle = Bundle.from_model(cast(nn.Module, model), **told)
    if device != "auto":
        bundle.model.to(torch_device)
    bundle.model.eval()
    return bundle


def _average(members: Sequence[Bundle]) -> Bundle:
    """Return models as one, whose probabilities are the mean of theirs. It has the recorded images of
    the first one, and neither a temperature nor thresholds."""
    if not members:
        raise ValueError("model is an empty list; name at least one model")
    first, *others = members
    if not others:
        return first
    for other in others:
        for name in ("is_multilabel", "class_names", "preprocess"):
            one, two = str(getattr(first, name)), str(getattr(other, name))
            if one != two:
                raise ValueError(
                    f"{first.name} and {other.name} can't be averaged: {name} is {shorten(one)} and"
                    f" {shorten(two)}"
                )
    hashes = [member.training_hashes for member in members if member.training_hashes is not None]
    joined = np.concatenate(hashes, axis=1) if len(hashes) == len(members) else None
    model = AveragedModel(
        [member.model for member in members],
        temperatures=[member.temperature for member in members],
        is_multilabel=first.is_multilabel,
    )
    return dataclasses.replace(
        first,
        model=model.eval(),
        name=" + ".join(member.name for member in members),
        sha256=hash_weights(model.state_dict()),
        metadata={"models": [member.name for member in members]},
        training_hashes=joined,
        likeness=None,
    )


def load_bundle(
    source: str | Path,
    *,
    model: nn.Module | None = None,
    class_names: Sequence[str] | None = None,
    preprocess: Preprocess | None = None,
    device: str | torch.device = "cpu",
) -> Bundle:
    """Load a model with all that its file or folder tells about it.

    Args:
        source: A run (its best model) or model file of vit; "imagenette", a
            small model that comes with the package; timm:NAME; a folder of
            timm or Hugging Face; or a file of weights with timm's names
            (.safetensors, .pth, .pth.tar, .ckpt). No code in it is run.
        model: A module for the weights of a file that neither this project
            nor timm can build by name, or whose number of heads is unusual.
        class_names: Name of each class, for weights that have none.
        preprocess: Preprocessing of images, for weights that have none.
        device: Device of the model, named as in torch.

    Returns:
        The model in evaluation mode, with its class names and preprocessing.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: The file is damaged or doesn't fit an argument.

    Example:
        >>> bundle = vit.load_bundle("vit.pth", class_names=("cat", "dog"))
        >>> bundle.save("model.safetensors")
    """
    path = find_model(source)
    # Building a model draws random weights, which must not change the caller's random numbers.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        if isinstance(path, str) or path.is_dir():
            if model is not None:
                raise ValueError(f"model=… is for a file of weights, not for {source}")
            found = open_folder(path)
        else:
            content = read_weights(path)
            metadata = content.metadata
            if metadata and (class_names is not None or preprocess is not None):
                raise ValueError(f"{source} has class names and preprocessing of its own")
            if model is None:
                model = build(content, origin=str(path))
            else:
                load_into(model, content.weights, origin=str(path))
            if metadata:
                return Bundle(
                    model=model.eval().to(device),
                    preprocess=Preprocess.from_dict(metadata["preprocess"]),
                    class_names=tuple(metadata["class_names"]),
                    name=str(expand_home(source)),
                    sha256=compute_sha256(path),
                    config=metadata["config"],
                    data=metadata["data"],
                    metadata=metadata,
                    training_hashes=content.training_hashes,
                    # an earlier version found features of other libraries' models
                    likeness=content.likeness if count_features(model) else None,
                )
            found = OpenedModel(model)
    if preprocess is None and found.preprocess is not None:
        preprocess = Preprocess.from_dict(found.preprocess)
    bundle = Bundle.from_model(
        found.module.to(device),
        class_names=class_names or found.class_names,
        preprocess=preprocess,
    )
    data = {"task": MULTILABEL} if found.is_multilabel else bundle.data
    return dataclasses.replace(bundle, data=data, name=str(expand_home(source)))
