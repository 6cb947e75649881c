"""A model as an ONNX file: traced, quantised, described in its metadata, and measured."""

import importlib.util
import json
import logging
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.deploy.export.answers import COVERAGE, Answers, LogitsAndFeatures
from vit.deploy.export.photo_model import PhotoModel
from vit.explanation.methods.rollout import LogitsAndRollout
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import write_atomically, write_text
from vit.runtime.version import __version__

TEMPLATES = Path(__file__).parent / "templates"
# to measure the accuracy
_BATCH_SIZE = 64


def check_packages() -> None:
    """Raise ValueError if a package of ONNX is missing."""
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"vit export --to onnx needs {' and '.join(missing)}: "
            "pip install 'vit-pipeline[export]'"
        )


def export_onnx(
    bundle: Bundle,
    directory: Path,
    *,
    precision: Literal["float32", "int8"],
    attention: bool,
    images: ImageDataset | None,
) -> Path:
    """Write model.onnx, its facts as model.json, and predict.py.

    The model takes "images" in RGB, uint8 [batch, height, width, 3] of any size, and gives
    "probabilities" [batch, classes]. In float32, if the model file holds thresholds, it also gives
    "prediction_set", bool [batch, classes], and "p_value" [batch]: quantised weights would need
    other thresholds.

    Args:
        bundle: The model.
        directory: Folder of the files.
        precision: "float32", or "int8" for onnxruntime's dynamic quantisation of linear layers.
        attention: Add the second output "attention" [batch, rows, columns], the attention rollout.
        images: Images on which the accuracy of int8 is measured and compared with float32.

    Returns:
        The path of model.onnx.
    """
    path = directory / "model.onnx"
    accuracy = None
    answers = None
    if precision == "float32":
        answers = Answers.from_bundle(bundle)
        _write_onnx(path, bundle, answers, attention=attention)
    else:
        float_path = directory / ".float32.onnx"
        _write_onnx(float_path, bundle, None, attention=attention)
        _quantise(float_path, path)
        if images is not None:
            accuracy = _compare_accuracy(float_path, path, images)
        float_path.unlink()

    facts = {
        "class_names": bundle.class_names,
        "preprocess": bundle.preprocess.to_dict(),
        "temperature": bundle.temperature,
        "sha256_of_source": bundle.sha256,
        "run_id": bundle.metadata.get("run_id"),
        "vit_version": __version__,
        "precision": precision,
        "attention": attention,
        "accuracy": accuracy,
        "coverage": None if answers is None else COVERAGE,
    }
    _write_metadata(path, facts)
    write_text(directory / "model.json", json.dumps(facts, indent=2) + "\n")
    shutil.copyfile(TEMPLATES / "predict.py", directory / "predict.py")
    return path


def _write_onnx(path: Path, bundle: Bundle, answers: Answers | None, *, attention: bool) -> None:
    """Write the file in float32, without metadata."""
    outputs = ["probabilities"]
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    traced: nn.Module = model
    if attention:
        outputs.append("attention")
        traced = LogitsAndRollout(model)
    elif answers is not None:
        traced = LogitsAndFeatures(model)
    if answers is not None:
        outputs += ["prediction_set", "p_value"]
    traced = PhotoModel(traced, bundle.preprocess, temperature=bundle.temperature, answers=answers)
    # these sizes differ from each other and from the model's: the tracer would identify equal ones
    height, width = bundle.preprocess.image_size
    example = torch.zeros(2, height + 3, width + 8, 3, dtype=torch.uint8)

    with _silence(), torch.no_grad():
        exported = torch.onnx.export(
            traced.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=outputs,
            # sizes along these axes stay free and get names
            dynamic_shapes=({0: "batch", 1: "height", 2: "width"},),
        )
        assert exported is not None
        write_atomically(path, lambda temporary: exported.save(temporary, external_data=False))


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


def _write_metadata(path: Path, facts: Mapping[str, Any]) -> None:
    """Write `facts` into the file, as text or JSON."""
    import onnx

    model = onnx.load(path)
    texts = {
        name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()
    }
    onnx.helper.set_model_props(model, texts)
    write_atomically(path, lambda temporary: onnx.save(model, temporary))


def _compare_accuracy(float_path: Path, path: Path, images: ImageDataset) -> dict[str, Any]:
    """Measure both files, in the runtime that will run them: a smaller one may be less accurate."""
    return {
        "top1": {
            "float32": _measure_top1(float_path, images),
            "int8": _measure_top1(path, images),
        },
        "data": images.name,
        "split": images.split,
        "num_images": len(images),
        "fingerprint": images.fingerprint,
    }


def _measure_top1(path: Path, images: ImageDataset) -> float:
    """Measure the share of `images`, decoded to `resize_size`, that a file predicts correctly."""
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    assert images.pixels is not None
    num_correct = 0
    for start in range(0, len(images), _BATCH_SIZE):
        batch = np.array(images.pixels[start : start + _BATCH_SIZE])
        labels = images.labels[start : start + _BATCH_SIZE]
        scores = session.run(None, {"images": batch})[0]  # [B, C]
        num_correct += int((scores.argmax(axis=1) == labels).sum())
    return num_correct / len(images)


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the log messages and warnings of the exporter and the quantiser."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
