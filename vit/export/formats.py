"""A model for other programs: timm's folder, ONNX, or torch's exported program."""

import importlib.util
import json
import logging
import warnings
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch.export import Dim, ExportedProgram

from vit.bundle import Bundle
from vit.model.model_file import MODEL_FILE
from vit.model.timm_weights import load_timm
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import write_atomically, write_text
from vit.runtime.output_dir import prepare_output

# what timm doesn't have, or gives another name or value
_NOT_IN_TIMM = {"mlp", "mlp_ratio", "stem", "global_pool", "pos_embed", "distilled"}
_NOT_IN_TIMM |= {"drop_path_rate", "attention_backend"}


def export_bundle(
    bundle: Bundle, to: Literal["timm", "onnx", "torch-export"], directory: Path, *, overwrite: bool = False
) -> Path:
    """Write `bundle` for other programs and return the folder for timm, or the file of the model.

    timm: the folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens; fixed sine-cosine positions
    become learned ones of the same values. onnx: from "images" [batch, C, height, width] to "logits" [batch, classes].
    torch-export: `torch.export.load(path).module()(images)` gives the logits. Beside these two, model.json says how to
    normalise images and read logits. Raises ValueError for a model that timm doesn't have or attention that we can't
    read, and without the packages of ONNX; FileExistsError where `directory` holds something without `overwrite`.
    """
    model = bundle.model if isinstance(bundle.model, VisionTransformer) else load_timm(bundle.model)
    # what is refused is refused before an earlier export is replaced
    config = describe_for_timm(bundle, model) if to == "timm" else {}
    prepare_output(directory, overwrite=overwrite)
    if to == "timm":
        positions = {} if model.pos_embed is None else {"pos_embed": model.pos_embed}
        state = {name: tensor.detach().cpu().contiguous() for name, tensor in (model.state_dict() | positions).items()}
        write_atomically(directory / MODEL_FILE, lambda path: save_file(state, path, metadata={"format": "pt"}))
        write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")
        return directory
    path = directory / ("model.onnx" if to == "onnx" else "model.pt2")
    (export_onnx if to == "onnx" else export_torch)(model, path)
    facts: dict[str, Any] = {"preprocess": bundle.preprocess.to_dict(), "class_names": list(bundle.class_names)}
    facts |= {"temperature": bundle.temperature, "sha256_of_source": bundle.sha256}
    facts |= {"run_id": bundle.metadata.get("run_id")}
    write_text(directory / "model.json", json.dumps(facts, indent=2) + "\n")
    return path


def describe_for_timm(bundle: Bundle, model: VisionTransformer) -> dict[str, Any]:
    """timm's config.json: one of its architectures (for swiglu one that has it: JSON can't name a class of MLP), its
    arguments and the preprocessing. Raises ValueError naming the first thing that timm doesn't have."""
    ours, preprocess = model.architecture, bundle.preprocess.to_dict()
    absent = {
        f"stem {ours['stem']!r}": ours["stem"] != "patch",
        f"mlp {ours['mlp']!r}": ours["mlp"] not in ("gelu", "swiglu"),
        f"global_pool {ours['global_pool']!r}": ours["global_pool"] == "attention",
        "distilled with swiglu": ours["distilled"] and ours["mlp"] == "swiglu",
        "distilled with registers": ours["distilled"] and ours["reg_tokens"] > 0,
        "distilled without learned positions": ours["distilled"] and ours["pos_embed"] == "none",
        "distilled without positions of the prefix tokens": ours["distilled"] and ours["no_embed_class"],
    }
    for what in (what for what, is_used in absent.items() if is_used):
        raise ValueError(f"timm's VisionTransformer has no {what}; export to onnx or torch-export instead")
    base = {"distilled": "deit_base_distilled_patch16_224", "swiglu": "vit_giant_patch14_dinov2"}
    classes, embedding = model.num_classes, model.patch_embed
    # timm cuts the product of width and ratio off, ours rounds it
    mlp_ratio = (round(model.embed_dim * ours["mlp_ratio"]) + 0.5) / model.embed_dim
    pos_embed = "none" if model.pos_embed is None else "learn"
    pretrained = {"input_size": [embedding.in_chans, *embedding.img_size], "fixed_input_size": True}
    pretrained |= {key: preprocess[key] for key in ("mean", "std", "crop_pct")} | {"crop_mode": "center"}
    pretrained |= {"interpolation": preprocess["interpolation"], "num_classes": classes}
    pretrained |= {"label_names": list(bundle.class_names), "pool_size": None, "first_conv": "patch_embed.proj"}
    return {
        "architecture": base.get("distilled" if ours["distilled"] else ours["mlp"], "vit_base_patch16_224"),
        "num_classes": classes,
        "num_features": model.embed_dim,
        "global_pool": model.global_pool,
        "model_args": {name: value for name, value in ours.items() if name not in _NOT_IN_TIMM}
        | {"mlp_ratio": mlp_ratio, "global_pool": model.global_pool, "pos_embed": pos_embed},
        "pretrained_cfg": pretrained | {"classifier": ["head", "head_dist"] if ours["distilled"] else "head"},
    }


def export_torch(model: VisionTransformer, path: Path) -> None:
    program = _trace(model)

    def save(path: Path) -> None:
        with path.open("wb") as file:  # given a path, it adds a suffix to it
            torch.export.save(program, file)

    write_atomically(path, save)


def export_onnx(model: VisionTransformer, path: Path) -> None:
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        cure = "try pip install 'vit-pipeline[onnx]'"
        raise ValueError(f"exporting to onnx takes {' and '.join(missing)}, not installed here; {cure}")
    names: dict[str, Any] = {"input_names": ["images"], "output_names": ["logits"]}
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)  # neither the exporter's log messages nor its warnings
    try:
        with warnings.catch_warnings(action="ignore"):
            program = torch.onnx.export(_trace(model), dynamo=True, verbose=False, **names)
            assert program is not None
            write_atomically(path, lambda temporary: program.save(temporary, external_data=False))
    finally:
        logger.setLevel(level)


def _trace(model: VisionTransformer) -> ExportedProgram:
    """The computation in evaluation mode, for any number of images (an example of one would fix it)."""
    images = next(model.parameters()).new_zeros(2, model.patch_embed.in_chans, *model.patch_embed.img_size)
    training = model.training
    try:
        with torch.no_grad():
            return torch.export.export(model.eval(), (images,), dynamic_shapes={"images": {0: Dim("batch")}})
    finally:
        model.train(training)
