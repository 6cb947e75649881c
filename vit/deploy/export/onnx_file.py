"""A model as one ONNX file, from normalised images to probabilities, and a program that runs it."""

import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.explanation.methods.rollout import attention_rollout
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import FileContent
from vit.runtime.version import __version__

ONNX_FILE = "model.onnx"
_PROGRAM = Path(__file__).with_name("templates") / "predict.py"
# version of ONNX's operators
_OPSET = 20


class Classifier(nn.Module):
    """From normalised images to logits, probabilities and, if asked for, attention rollout: without
    hooks, so that an exporter can trace it."""

    def __init__(self, bundle: Bundle, *, attention: bool) -> None:
        super().__init__()
        self.model = bundle.model
        self.attention = attention
        self.temperature = bundle.temperature
        self.is_multilabel = bundle.is_multilabel

    def forward(self, pixel_values: Float[Tensor, "B 3 H W"]) -> tuple[Tensor, ...]:
        """Compute logits divided by the temperature and probabilities, [B, C], and maps [B, rows,
        columns]."""
        maps: tuple[Tensor, ...] = ()
        if self.attention:
            assert isinstance(self.model, VisionTransformer)
            logits, attentions = self.model.forward_with_attention(pixel_values)
            maps = (_roll_out(self.model, attentions),)
        else:
            logits = self.model(pixel_values)
        logits = logits / self.temperature
        probabilities = logits.sigmoid() if self.is_multilabel else logits.softmax(dim=-1)
        return (logits, probabilities, *maps)


def _roll_out(
    model: VisionTransformer, attentions: list[Tensor]
) -> Float[Tensor, "B rows columns"]:
    rollout = attention_rollout(attentions)
    num_prefix = model.num_prefix_tokens
    relevance = rollout[:, 0]
    if model.global_pool != "token":
        relevance = rollout[:, num_prefix:].mean(dim=1)
    return torch.unflatten(relevance[:, num_prefix:], -1, model.grid_size)


def build_onnx_files(bundle: Bundle, *, attention: bool) -> dict[str, FileContent]:
    """Build model.onnx, with all facts that a program needs in its metadata, and a program."""
    try:
        import onnx
        import onnxscript  # noqa: F401  # torch's exporter needs it
    except ImportError as error:
        raise ValueError(
            "vit export --format onnx needs onnx and onnxscript: pip install '.[export]' in the"
            " clone of vit"
        ) from error

    height, width = bundle.preprocess.image_size
    with _silence(), torch.no_grad():
        exported = torch.onnx.export(
            Classifier(bundle, attention=attention).eval(),
            (torch.zeros(2, 3, height, width),),
            dynamo=True,
            verbose=False,
            input_names=["pixel_values"],
            output_names=["logits", "probabilities", *(["attention"] if attention else [])],
            opset_version=_OPSET,
            # the number of images stays free
            dynamic_shapes=({0: "batch"},),
        )
    assert exported is not None
    # torch 2.8 leaves some nodes before those that they read
    exported.model.graph.sort()
    proto = exported.model_proto
    # the exporter's notes: paths and lines of the code on this machine, names of its variables
    del proto.graph.value_info[:]
    for part in (proto.graph, *proto.graph.node, *proto.graph.input, *proto.graph.output):
        del part.metadata_props[:]
    # the file alone says how to use it, because files of an export get separated
    facts = {
        "class_names": bundle.class_names,
        "preprocess": bundle.preprocess.to_dict(),
        "task": bundle.data.get("task", "classes"),
        "temperature": bundle.temperature,
        "thresholds": bundle.operating_point.get("thresholds", {}),
        "sha256_of_source": bundle.sha256,
        "vit_version": __version__,
    }
    onnx.helper.set_model_props(proto, {name: json.dumps(fact) for name, fact in facts.items()})
    return {ONNX_FILE: proto.SerializeToString(), _PROGRAM.name: _PROGRAM.read_bytes()}


@contextmanager
def _silence() -> Iterator[None]:
    """Suppress the log messages and warnings of the exporter, which are about its graph."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"), redirect_stdout(None):
            yield
    finally:
        logging.disable(before)
