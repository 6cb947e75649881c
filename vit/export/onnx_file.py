"""The ONNX file: traced, quantised, described in its own metadata, and measured with onnxruntime."""

import copy
import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from vit.data.dataset import DecodedDataset
from vit.data.images import Preprocess
from vit.export.photo_model import PhotoModel
from vit.runtime.files import write_atomically

Input = Literal["uint8", "float32", "normalised"]
WeightPrecision = Literal["float32", "float16", "int8"]
_BATCH = 64  # images at a time when the accuracy is measured


@dataclass(frozen=True)
class OnnxOptions:
    """`input` "uint8" and "float32": "images" in RGB, [batch, height, width, 3] of any size and 0 to 255, to
    "probabilities" [batch, classes]. "normalised": what the model takes, [batch, 3, H, W], to "logits". `maps`: the
    model with attention maps after its logits, the second output "attention" [batch, rows, columns]. `precision` is
    that of the weights; int8 is onnxruntime's dynamic quantisation of the linear layers."""

    input: Input = "uint8"
    precision: WeightPrecision = "float32"
    maps: nn.Module | None = None


def check_packages() -> None:
    """Raise ValueError without those of ONNX."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if importlib.util.find_spec(name) is None]
    if missing:
        cure = "try pip install 'vit-pipeline[export]'"
        raise ValueError(f"exporting to onnx takes {' and '.join(missing)}, not installed here; {cure}")


def write_onnx(
    path: Path, model: nn.Module, options: OnnxOptions, *, preprocess: Preprocess, temperature: float
) -> None:
    """The file without metadata; in float32 or, by its options, in float16."""
    net = model if options.maps is None else options.maps
    if options.precision == "float16":
        net = copy.deepcopy(net).half()
    size, axes, outputs = preprocess.image_size, ["batch"], ["logits", "attention"]
    if options.input == "normalised":
        example = torch.zeros(2, 3, *size, dtype=next(net.parameters()).dtype)
    else:
        # sizes that differ from each other and from the model's, or the tracer takes them for the same
        example = torch.zeros(2, size[0] + 3, size[1] + 8, 3, dtype=getattr(torch, options.input))
        net, axes = PhotoModel(net, preprocess, temperature=temperature), ["batch", "height", "width"]
        outputs = ["probabilities", "attention"]
    names: dict[str, Any] = {"input_names": ["images"], "output_names": outputs[: 1 + (options.maps is not None)]}
    names["dynamic_shapes"] = (dict(enumerate(axes)),)  # their names in the file
    with _silence():
        exported = torch.onnx.export(trace(net, example, axes), dynamo=True, verbose=False, **names)
        assert exported is not None
        write_atomically(path, lambda temporary: exported.save(temporary, external_data=False))


def quantise_onnx(source: Path, path: Path) -> None:
    """`source` with 8-bit linear layers."""
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(source)
    del model.graph.value_info[:]  # shapes of weights that the quantiser transposes
    # without signed weights: their products saturate on processors without VNNI
    settings: dict[str, Any] = {"weight_type": QuantType.QUInt8, "per_channel": True}
    settings["op_types_to_quantize"] = ["MatMul", "Gemm"]
    with _silence():
        write_atomically(path, lambda temporary: quantize_dynamic(model, temporary, **settings))


def write_onnx_metadata(path: Path, facts: Mapping[str, Any]) -> None:
    """Keep `facts` in the file, as text or JSON."""
    import onnx

    model = onnx.load(path)
    texts = {name: fact if isinstance(fact, str) else json.dumps(fact) for name, fact in facts.items()}
    onnx.helper.set_model_props(model, texts)
    write_atomically(path, lambda temporary: onnx.save(model, temporary))


def measure_top1(path: Path, options: OnnxOptions, images: DecodedDataset, *, preprocess: Preprocess) -> float:
    """The fraction of `images`, decoded to the preprocessing's `resize_size`, whose label the file's model finds."""
    import onnxruntime

    session, hits, pixels = onnxruntime.InferenceSession(path), 0, images.images
    assert pixels is not None
    for start in range(0, len(images), _BATCH):
        batch = np.array(pixels[start : start + _BATCH])
        if options.input == "normalised":
            given = preprocess.normalize(torch.from_numpy(preprocess.crop(batch))).numpy()
            batch = given.astype(np.float16) if options.precision == "float16" else given
        else:
            batch = batch.astype(options.input)
        best = session.run(None, {"images": batch})[0].argmax(axis=1)
        hits += int((best == images.labels[start : start + _BATCH]).sum())
    return hits / len(images)


def trace(model: nn.Module, example: torch.Tensor, axes: Sequence[str]) -> ExportedProgram:
    """The computation in evaluation mode, for any sizes along the first `axes` (a size of one would be fixed)."""
    training, shape = model.training, {place: Dim(name) for place, name in enumerate(axes)}
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), (example,), dynamic_shapes=(shape,))
    finally:
        model.train(training)


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
