"""The ONNX file: traced, quantised, described in its own metadata, and measured with
onnxruntime."""

import importlib.util
import json
import logging
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
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import write_atomically
from vit.runtime.version import __version__

WeightPrecision = Literal["float32", "int8"]
_BATCH_SIZE = 64  # when the accuracy is measured


def check_packages() -> None:
    """Raise ValueError where the packages of ONNX are missing."""
    packages = ("onnx", "onnxscript", "onnxruntime")
    missing = [name for name in packages if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"exporting to onnx takes {' and '.join(missing)}, not installed here; "
            "try pip install 'vit-pipeline[export]'"
        )


def export_onnx(
    bundle: Bundle,
    directory: Path,
    *,
    precision: WeightPrecision,
    with_maps: nn.Module | None,
    images: ImageDataset | None,
) -> Mapping[str, Any]:
    """Write model.onnx: from "images" in RGB, uint8 [batch, height, width, 3] of any size, to
    "probabilities" [batch, classes]. In float32, of a model whose file holds thresholds, also to
    "prediction_set", bool [batch, classes], and "p_value" [batch]: those of other weights would
    need other thresholds.

    Args:
        bundle: The model.
        directory: Where the file goes.
        precision: Of the weights; "int8" is onnxruntime's dynamic quantisation of the linear
            layers.
        with_maps: The model with attention maps between its logits and features, the second output
            "attention" [batch, rows, columns]; None: without.
        images: On which the accuracy of int8 is measured beside that of float32; None: it isn't.

    Returns:
        The facts in its metadata: all that a program needs beside the graph.
    """
    path = directory / "model.onnx"
    accuracy = None
    answers = None
    if precision == "float32":
        answers = Answers.from_bundle(bundle)
        _write_onnx(path, bundle, with_maps, answers)
    else:
        # a smaller file may be less accurate: both are measured, by the runtime that will run them
        float_path = directory / ".float32.onnx"
        _write_onnx(float_path, bundle, with_maps, None)
        _quantise(float_path, path)
        if images is not None:
            accuracy = {
                "top1": {
                    "float32": _measure_top1(float_path, images),
                    "int8": _measure_top1(path, images),
                },
                "data": images.name,
                "split": images.split,
                "num_images": len(images),
                "fingerprint": images.fingerprint,
            }
        float_path.unlink()

    facts = {
        "class_names": bundle.class_names,
        "preprocess": bundle.preprocess.to_dict(),
        "temperature": bundle.temperature,
        "sha256_of_source": bundle.sha256,
        "run_id": bundle.metadata.get("run_id"),
        "vit_version": __version__,
        "precision": precision,
        "attention": with_maps is not None,
        "accuracy": accuracy,
        "coverage": None if answers is None else COVERAGE,
    }
    _write_metadata(path, facts)
    return facts


def _write_onnx(
    path: Path, bundle: Bundle, with_maps: nn.Module | None, answers: Answers | None
) -> None:
    """The file in float32, without metadata."""
    outputs = ["probabilities"]
    model = bundle.model
    if with_maps is not None:
        outputs.append("attention")
        model = with_maps
    elif answers is not None:
        assert isinstance(model, VisionTransformer)
        model = LogitsAndFeatures(model)
    if answers is not None:
        outputs += answers.output_names
    model = PhotoModel(model, bundle.preprocess, temperature=bundle.temperature, answers=answers)
    # sizes that differ from each other and from the model's, or the tracer takes them for the same
    height, width = bundle.preprocess.image_size
    example = torch.zeros(2, height + 3, width + 8, 3, dtype=torch.uint8)

    with _silence(), torch.no_grad():
        exported = torch.onnx.export(
            model.eval(),
            (example,),
            dynamo=True,
            verbose=False,
            input_names=["images"],
            output_names=outputs,
            # sizes along these axes stay free, under their names
            dynamic_shapes=({0: "batch", 1: "height", 2: "width"},),
        )
        assert exported is not None
        write_atomically(path, lambda temporary: exported.save(temporary, external_data=False))


def _quantise(source: Path, path: Path) -> None:
    """`source` with 8-bit linear layers."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # shapes of weights that the quantiser transposes

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
    """Keep `facts` in the file, as text or JSON."""
    import onnx

    model = onnx.load(path)
    texts = {
        name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()
    }
    onnx.helper.set_model_props(model, texts)
    write_atomically(path, lambda temporary: onnx.save(model, temporary))


def _measure_top1(path: Path, images: ImageDataset) -> float:
    """The fraction of `images`, decoded to the preprocessing's `resize_size`, whose label the
    file's model finds."""
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
    """Neither the exporter's and the quantiser's log messages nor their warnings."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logging.disable(before)
