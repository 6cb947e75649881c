"""A model for other programs: timm's folder, ONNX, or torch's exported program."""

import importlib.util
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch.export import Dim, ExportedProgram

from vit.bundle import Bundle
from vit.model.timm_weights import load_timm
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import write_atomically, write_text
from vit.runtime.output_dir import prepare_output

_SAME_NAME_IN_TIMM = (
    "img_size",
    "patch_size",
    "in_chans",
    "num_classes",
    "embed_dim",
    "depth",
    "num_heads",
    "qkv_bias",
    "qk_norm",
    "init_values",
    "class_token",
    "fc_norm",
    "no_embed_class",
    "reg_tokens",
)


def export_bundle(
    bundle: Bundle, to: Literal["timm", "onnx", "torch-export"], directory: Path, *, overwrite: bool = False
) -> Path:
    """Write `bundle` for other programs and return the folder for timm, or the file of the model.

    model.json, beside a model for onnx or torch-export, says how to normalise images and read logits. Raises
    ValueError for a model that timm has not or attention that we can't read, FileExistsError where `directory` holds
    something and `overwrite` is not given.
    """
    model, preprocess = bundle.model, bundle.preprocess.to_dict()
    if not isinstance(model, VisionTransformer):
        model = load_timm(model)
    if to == "timm":  # refuses what timm has not, before an earlier export is replaced
        describe_for_timm(model, preprocess=preprocess, class_names=bundle.class_names)
    prepare_output(directory, overwrite=overwrite)
    if to == "timm":
        export_timm(model, directory, preprocess=preprocess, class_names=bundle.class_names)
        return directory
    path = directory / ("model.onnx" if to == "onnx" else "model.pt2")
    (export_onnx if to == "onnx" else export_torch)(model, path)
    facts = {
        "preprocess": preprocess,
        "class_names": list(bundle.class_names),
        "temperature": bundle.temperature,
        "sha256_of_source": bundle.sha256,
    }
    write_text(directory / "model.json", json.dumps(facts, indent=2) + "\n")
    return path


def export_timm(
    model: VisionTransformer, directory: Path, *, preprocess: dict[str, Any], class_names: tuple[str, ...]
) -> None:
    """Write a folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens.

    Fixed sine-cosine positions become learned ones of the same values. `preprocess` holds the values of a
    `Preprocess`. Raises ValueError naming the first thing that timm's VisionTransformer has not.
    """
    config = describe_for_timm(model, preprocess=preprocess, class_names=class_names)
    state = {name: tensor.detach().cpu().contiguous() for name, tensor in model.state_dict().items()}
    if model.pos_embed is not None:
        state["pos_embed"] = model.pos_embed.detach().cpu().contiguous()
    write_atomically(
        directory / "model.safetensors", lambda path: save_file(state, path, metadata={"format": "pt"})
    )
    write_text(directory / "config.json", json.dumps(config, indent=2) + "\n")


def describe_for_timm(
    model: VisionTransformer, *, preprocess: dict[str, Any], class_names: tuple[str, ...]
) -> dict[str, Any]:
    """timm's config.json: which of its architectures, with what arguments, fed how.

    JSON has no word for a kind of MLP, so swiglu comes by the name of a timm architecture that has it.
    """
    ours = model.architecture
    absent = {
        f"stem {ours['stem']!r}": ours["stem"] != "patch",
        f"mlp {ours['mlp']!r}": ours["mlp"] not in ("gelu", "swiglu"),
        f"global_pool {ours['global_pool']!r}": ours["global_pool"] == "attention",
        "distilled with swiglu": ours["distilled"] and ours["mlp"] == "swiglu",
        "distilled with registers": ours["distilled"] and ours["reg_tokens"] > 0,
        "distilled without learned positions": ours["distilled"] and ours["pos_embed"] == "none",
        "distilled with positions off the prefix tokens": ours["distilled"] and ours["no_embed_class"],
    }
    for what, is_there in absent.items():
        if is_there:
            raise ValueError(
                f"timm's VisionTransformer has no {what}; export to onnx or torch-export instead"
            )
    hidden = round(model.embed_dim * ours["mlp_ratio"])
    base = {"distilled": "deit_base_distilled_patch16_224", "swiglu": "vit_giant_patch14_dinov2"}
    kind = "distilled" if ours["distilled"] else ours["mlp"]
    return {
        "architecture": base.get(kind, "vit_base_patch16_224"),
        "num_classes": model.num_classes,
        "num_features": model.embed_dim,
        "global_pool": model.global_pool,
        "model_args": {name: ours[name] for name in _SAME_NAME_IN_TIMM}
        | {
            "mlp_ratio": (hidden + 0.5) / model.embed_dim,  # timm cuts the product off, ours rounds it
            "global_pool": model.global_pool,
            "pos_embed": "none" if model.pos_embed is None else "learn",
        },
        "pretrained_cfg": {
            "input_size": [model.patch_embed.in_chans, *model.patch_embed.img_size],
            "fixed_input_size": True,
            "mean": list(preprocess["mean"]),
            "std": list(preprocess["std"]),
            "crop_pct": preprocess["crop_pct"],
            "crop_mode": "center",
            "interpolation": preprocess["interpolation"],
            "num_classes": model.num_classes,
            "label_names": list(class_names),
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if ours["distilled"] else "head",
        },
    }


def export_torch(model: VisionTransformer, path: Path) -> None:
    """Write a `.pt2`: `torch.export.load(path).module()(images)` gives the logits of any number of images."""
    program = _trace(model)
    write_atomically(path, lambda temporary: _save_program(program, temporary))


def export_onnx(model: VisionTransformer, path: Path) -> None:
    """Write an ONNX model from "images" [batch, C, height, width] to "logits" [batch, classes].

    Raises ValueError where the packages that it takes aren't installed.
    """
    missing = [name for name in ("onnx", "onnxscript") if importlib.util.find_spec(name) is None]
    if missing:
        raise ValueError(
            f"exporting to onnx takes {' and '.join(missing)}, not installed here; "
            "try pip install 'vit-pipeline[onnx]'"
        )
    with _quiet():
        program = torch.onnx.export(
            _trace(model), dynamo=True, input_names=["images"], output_names=["logits"], verbose=False
        )
        assert program is not None
        write_atomically(path, lambda temporary: program.save(temporary, external_data=False))


def _trace(model: VisionTransformer) -> ExportedProgram:
    """The computation in evaluation mode, the number of images left open (an example of one would fix it)."""
    first = next(model.parameters())
    images = first.new_zeros(2, model.patch_embed.in_chans, *model.patch_embed.img_size)
    training = model.training
    model.eval()
    try:
        with torch.no_grad():
            return torch.export.export(model, (images,), dynamic_shapes={"images": {0: Dim("batch")}})
    finally:
        model.train(training)


def _save_program(program: ExportedProgram, path: Path) -> None:
    with path.open("wb") as file:
        torch.export.save(program, file)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporter's notes about its own insides."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
