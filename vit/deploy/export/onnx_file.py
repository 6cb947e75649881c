"""A model as an ONNX file: traced, quantised, described in its metadata, and measured."""

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, Literal, Self

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from vit.bundle import MULTILABEL, Bundle
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.deploy.export.photo_model import Classifier, PhotoModel
from vit.deploy.export.python_formats import write_program
from vit.deploy.export.tensor_files import write_tensor_files
from vit.evaluation.label_metrics import LabelScores, compute_label_metrics
from vit.explanation.methods.rollout import LogitsAndRollout
from vit.model.model_file import NUM_NEIGHBOURS
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.decision import read_class_threshold, read_thresholds
from vit.runtime.files import write_atomically, write_text
from vit.runtime.version import __version__

# coverage of the prediction sets
COVERAGE = 0.95
# to measure the accuracy
_BATCH_SIZE = 64
Input = Literal["photo", "tensor"]


class LogitsAndFeatures(nn.Module):
    """A model that gives its logits and the pooled features that its head reads."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> tuple[Tensor, Tensor]:
        """Compute logits [B, C] and features [B, D]."""
        tokens = self.model.forward_features(images)
        return self.model.forward_head(tokens), self.model.pool(tokens, self.model.global_pool)


class Decision(nn.Module):
    """The decision of `vit.prediction.decision`, made of operations that every runtime has.

    Args:
        thresholds: Probability from which each label is predicted, [C]; or that of the class.
        place: The class that is predicted from its threshold on, against the rest; None for labels.
    """

    thresholds: Tensor

    def __init__(self, thresholds: Tensor, place: int | None) -> None:
        super().__init__()
        self.register_buffer("thresholds", thresholds.float())
        self.place = place

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Self | None:
        """Build it; None where the most probable class is predicted."""
        if bundle.is_multilabel:
            return cls(torch.from_numpy(read_thresholds(bundle)), None)
        threshold = read_class_threshold(bundle)
        if threshold is None:
            return None
        return cls(torch.tensor(threshold.probability), threshold.place)

    def forward(self, probabilities: Float[Tensor, "B C"]) -> Bool[Tensor, "B C"]:
        """Decide which labels each image has, or which class."""
        if self.place is None:
            return probabilities >= self.thresholds
        places = torch.arange(probabilities.shape[1], device=probabilities.device)
        others = probabilities.masked_fill(places == self.place, -1).argmax(dim=1, keepdim=True)
        is_reached = probabilities[:, self.place, None] >= self.thresholds
        return places == torch.where(is_reached, self.place, others)


class Answers(nn.Module):
    """The prediction sets and p-values of `vit.prediction.conformal`, made of operations that every
    runtime has.

    Args:
        threshold: Smallest probability, without a temperature, of a class or label in the set; None
            for no sets.
        training_features: Features [m, D] of training images, of length one.
        distances: Distances [n] of images that were not trained on, ascending.
        multilabel: See `Classifier`.
    """

    training_features: Tensor
    distances: Tensor

    def __init__(
        self,
        threshold: float | None,
        training_features: Tensor,
        distances: Tensor,
        *,
        multilabel: bool,
    ) -> None:
        super().__init__()
        self.multilabel = multilabel
        self.threshold = threshold
        self.register_buffer("training_features", training_features)
        self.register_buffer("distances", distances)

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Self | None:
        """Build it from a model file; None where the file lacks features."""
        thresholds = bundle.metadata.get("conformal", {}).get("thresholds", {})
        threshold = thresholds.get(str(COVERAGE))
        if bundle.likeness is None:
            return None
        training_features = torch.from_numpy(bundle.likeness.training_features).float()
        return cls(
            threshold,
            # their lengths were rounded in float16
            nn.functional.normalize(training_features),
            torch.from_numpy(bundle.likeness.distances),
            multilabel=bundle.is_multilabel,
        )

    def forward(
        self, logits: Float[Tensor, "B C"], features: Float[Tensor, "B D"]
    ) -> tuple[Tensor, ...]:
        """Compute which classes are in the set, bool [B, C], if there is a threshold, and p-values
        [B]."""
        probabilities = logits.sigmoid() if self.multilabel else logits.softmax(dim=-1)
        sets = () if self.threshold is None else (probabilities >= self.threshold,)
        units = features / features.norm(dim=1, keepdim=True).clamp(min=1e-12)
        cosines = units @ self.training_features.T  # [B, m]
        k = min(NUM_NEIGHBOURS, len(self.training_features))
        nearest = cosines.topk(k, dim=1).values[:, -1:]
        distances = (2 - 2 * nearest).clamp(min=0).sqrt()  # [B, 1]
        num_as_far = (self.distances >= distances).sum(dim=1)
        return *sets, (num_as_far + 1).float() / (len(self.distances) + 1)

    @property
    def names(self) -> list[str]:
        """Names of its outputs."""
        return ["p_value"] if self.threshold is None else ["prediction_set", "p_value"]


def check_packages() -> None:
    """Raise ValueError if a package of ONNX is missing."""
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"vit export --format onnx needs {' and '.join(missing)}: "
            "pip install '.[export]' in the clone of vit"
        )


def export_onnx(
    bundle: Bundle,
    directory: Path,
    *,
    input: Input,
    precision: Literal["float32", "float16", "int8"],
    attention: bool,
    batch_size: int | None,
    opset: int,
    images: ImageDataset | None,
) -> Path:
    """Write model.onnx, its facts as model.json, and predict.py or, for tensors, preprocess.json and
    examples.

    From photos, the model takes "images" in RGB, uint8 [batch, height, width, 3] of any size, and
    gives "probabilities" [batch, classes] and last "pixel_values", the normalised images. From
    tensors, it takes "pixel_values" in float32 [batch, 3, H, W], and gives "logits", "probabilities"
    and last "features". Where an image may have several labels, or the model file has an operating
    point, both give "predicted", bool [batch, classes]. As far as the model file holds what they
    need, they also give "prediction_set", bool [batch, classes], and "p_value" [batch], but not with
    weights of 8 bits, which would need other thresholds.

    Args:
        bundle: The model.
        directory: Folder of the files.
        input: "photo" or "tensor".
        precision: "float32"; "float16" for weights and computing; or "int8" for onnxruntime's dynamic
            quantisation of linear layers.
        attention: Add the output "attention" [batch, rows, columns], the attention rollout.
        batch_size: Images a batch; None for any number.
        opset: Version of ONNX's operators.
        images: Images on which the accuracy of int8 is measured and compared with float32.

    Returns:
        The path of model.onnx.
    """
    import onnx

    path = directory / "model.onnx"
    accuracy = None
    answers = None if precision == "int8" else Answers.from_bundle(bundle)
    # hidden, because it is deleted when it was quantised and measured
    float_path = directory / ".float32.onnx" if precision == "int8" else path
    _write_onnx(
        float_path,
        bundle,
        answers,
        input=input,
        attention=attention,
        batch_size=batch_size,
        opset=opset,
        dtype=torch.float16 if precision == "float16" else torch.float32,
    )
    if precision == "int8":
        _quantise(float_path, path)
        if images is not None:
            # in the runtime that will run the files
            accuracy = {
                "map" if bundle.is_multilabel else "top1": {
                    "float32": _measure(float_path, images, bundle.preprocess),
                    "int8": _measure(path, images, bundle.preprocess),
                },
                "data": images.name,
                "split": images.split,
                "num_images": len(images),
                "fingerprint": images.fingerprint,
            }
        float_path.unlink()

    # the file alone says how to use it, because files of an export get separated
    proto = onnx.load(path)
    facts = {
        "class_names": bundle.class_names,
        "preprocess": bundle.preprocess.to_dict(),
        "temperature": bundle.temperature,
        "sha256_of_source": bundle.sha256,
        "run_id": bundle.metadata.get("run_id"),
        "vit_version": __version__,
        "input": input,
        "precision": precision,
        "attention": attention,
        "batch_size": batch_size,
        "outputs": [output.name for output in proto.graph.output],
        "accuracy": accuracy,
        "coverage": None if answers is None or answers.threshold is None else COVERAGE,
    }
    if bundle.is_multilabel:
        facts["task"] = MULTILABEL
    if bundle.operating_point:
        facts["operating_point"] = bundle.operating_point
    texts = {
        name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()
    }
    # the exporter's notes: paths and lines of the code on this machine, names of its variables
    del proto.graph.value_info[:]
    for part in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        del part.metadata_props[:]
    if opset < 18:
        proto = _convert(proto, opset)
    onnx.helper.set_model_props(proto, texts)
    write_atomically(path, lambda temporary: onnx.save(proto, temporary))
    write_text(directory / "model.json", json.dumps(facts, indent=2) + "\n")
    if input == "photo":
        write_program(directory / "predict.py")
    else:
        write_tensor_files(directory, bundle.preprocess, batch_size=batch_size or 1)
    return path


def _write_onnx(
    path: Path,
    bundle: Bundle,
    answers: Answers | None,
    *,
    input: Input,
    attention: bool,
    batch_size: int | None,
    opset: int,
    dtype: torch.dtype,
) -> None:
    """Write the file without metadata."""
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    if dtype != torch.float32:
        model = copy.deepcopy(model).to(dtype)
    decision = Decision.from_bundle(bundle)
    traced: nn.Module = Classifier(
        LogitsAndRollout(model) if attention else LogitsAndFeatures(model),
        temperature=bundle.temperature,
        multilabel=bundle.is_multilabel,
        decision=decision,
        answers=answers,
        dtype=dtype,
    )
    outputs = ["probabilities"]
    if attention:
        outputs.append("attention")
    if decision is not None:
        outputs.append("predicted")
    if answers is not None:
        outputs += answers.names

    height, width = bundle.preprocess.image_size
    count = batch_size or 2
    sizes = {} if batch_size else {0: "batch"}
    if input == "photo":
        traced = PhotoModel(traced, bundle.preprocess)
        inputs, outputs = ["images"], [*outputs, "pixel_values"]
        # these sizes differ from each other and from the model's: the tracer would identify equal ones
        example = torch.zeros(count, height + 3, width + 8, 3, dtype=torch.uint8)
        sizes |= {1: "height", 2: "width"}
    else:
        inputs, outputs = ["pixel_values"], ["logits", *outputs, "features"]
        example = torch.zeros(count, 3, height, width)

    with _silence(), torch.no_grad():
        exported = torch.onnx.export(
            traced.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            input_names=inputs,
            output_names=outputs,
            opset_version=max(opset, 18),
            # sizes along these axes stay free and get names
            dynamic_shapes=(sizes,),
        )
        assert exported is not None
        # torch 2.8 leaves some nodes before those that they read
        exported.model.graph.sort()
        write_atomically(path, lambda temporary: exported.save(temporary, external_data=False))


def _convert(proto: Any, opset: int) -> Any:
    """Convert a graph to an earlier version of the operators."""
    from onnx import version_converter

    for node in proto.graph.node:
        for attribute in node.attribute:
            # the converter doesn't know that version 17 has only the default
            if attribute.name == "noop_with_empty_axes":
                node.attribute.remove(attribute)
                break
    return version_converter.convert_version(proto, opset)


def _quantise(source: Path, path: Path) -> None:
    """Write a copy of `source` with 8-bit linear layers."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    # these hold shapes of weights, which the quantiser transposes
    del model.graph.value_info[:]

    def write(temporary: Path) -> None:
        quantize_dynamic(
            model,
            temporary,
            op_types_to_quantize=["MatMul", "Gemm"],
            per_channel=True,
            # products of signed weights saturate on processors without VNNI
            weight_type=QuantType.QUInt8,
        )

    with _silence():
        write_atomically(path, write)


def _measure(path: Path, images: ImageDataset, preprocess: Preprocess) -> float:
    """Measure a file on images decoded to `resize_size`: the share of them that it predicts correctly,
    or the mean average precision of labels."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    assert images.pixels is not None
    names = [output.name for output in session.get_outputs()]
    (given,) = session.get_inputs()
    count = given.shape[0] if isinstance(given.shape[0], int) else _BATCH_SIZE
    # an operating point decides
    name = "predicted" if "predicted" in names and not images.is_multilabel else "probabilities"
    parts = []
    for start in range(0, len(images), count):
        batch = np.array(images.pixels[start : start + count])
        # a file of fixed batches takes whole ones
        missing = count - len(batch) if isinstance(given.shape[0], int) else 0
        batch = np.concatenate([batch, np.repeat(batch[:1], missing, axis=0)])
        if given.name == "pixel_values":
            batch = preprocess.normalize(torch.from_numpy(preprocess.crop(batch))).numpy()
        parts += session.run([name], {given.name: batch})
    scores = np.concatenate(parts)[: len(images)]  # [n, C]
    if images.is_multilabel:
        values = LabelScores(images.labels, scores.astype(float), np.zeros(len(images)))
        return compute_label_metrics(values)["map"]
    return float((scores.argmax(axis=1) == images.labels).mean())


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the log messages and warnings of the exporter and the quantiser."""
    # their messages are about the graph, which a user can't change
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(None):
            yield
    finally:
        logging.disable(before)
