"""A model for other programs: a folder with ONNX, for timm or for transformers, or torch's exported program."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file

from vit.bundle import Bundle
from vit.data.dataset import DecodedDataset
from vit.export.card import CardFacts, write_card
from vit.export.onnx_file import (
    OnnxOptions,
    WeightPrecision,
    check_packages,
    measure_top1,
    quantise_onnx,
    trace,
    write_onnx,
    write_onnx_metadata,
)
from vit.model.model_file import MODEL_FILE
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import write_atomically, write_text
from vit.runtime.output_dir import prepare_output
from vit.runtime.version import __version__

Form = Literal["onnx", "timm", "huggingface", "torch-export"]
TEMPLATES = Path(__file__).parent / "templates"
# what timm doesn't have, or gives another name or value
_NOT_IN_TIMM = {"mlp", "mlp_ratio", "stem", "global_pool", "pos_embed", "distilled"}
_NOT_IN_TIMM |= {"drop_path_rate", "attention_backend"}


def export_bundle(
    bundle: Bundle,
    to: Form,
    directory: Path,
    *,
    options: OnnxOptions,
    images: DecodedDataset | None,
    card: CardFacts,
    overwrite: bool,
) -> Path:
    """Write `bundle`, of our VisionTransformer, for other programs; `directory`, or the file of the model for ONNX and
    torch-export.

    onnx: model.onnx as `OnnxOptions` says, and predict.py. timm: the folder that `timm.create_model("local-dir:FOLDER",
    pretrained=True)` opens, after `import timm_vit` where that file is in it; fixed sine-cosine positions become
    learned ones of the same values. huggingface: what transformers opens with `trust_remote_code=True`. torch-export:
    `torch.export.load(path).module()(images)` gives the logits of normalised images. model.json says the preprocessing,
    README.md is a model card. The accuracy of an ONNX file is measured on `images`, with labels of the model's classes,
    where there are any. Raises ValueError for a model that timm doesn't have, and without the packages of ONNX;
    FileExistsError where `directory` holds something without `overwrite`.
    """
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    # what is refused is refused before an earlier export is replaced
    config = describe_for_timm(bundle, model) if to in ("timm", "huggingface") else {}
    if to == "onnx":
        check_packages()
    facts: dict[str, Any] = {"class_names": list(bundle.class_names), "preprocess": bundle.preprocess.to_dict()}
    facts |= {"temperature": bundle.temperature, "sha256_of_source": bundle.sha256}
    facts |= {"run_id": bundle.metadata.get("run_id"), "vit_version": __version__}
    prepare_output(directory, overwrite=overwrite)
    path = directory
    if to == "onnx":
        path = directory / "model.onnx"
        facts |= _export_onnx(bundle, path, options, images, facts)
    elif to == "torch-export":
        path = directory / "model.pt2"
        write_atomically(path, lambda temporary: _save_program(model, temporary))
    else:
        _write_weights(model, directory / MODEL_FILE, prefix="vit." if to == "huggingface" else "")
        needs_code = to == "huggingface" or config["architecture"] == "vit_with_stem"
        for name in (["timm_vit.py"] if needs_code else []) + (["modeling_vit.py"] if to == "huggingface" else []):
            shutil.copyfile(TEMPLATES / name, directory / name)
        if to == "huggingface":
            config, processor = describe_for_transformers(bundle, config)
            _write_json(directory / "preprocessor_config.json", processor)
        _write_json(directory / "config.json", config)
    if to in ("onnx", "torch-export"):
        _write_json(directory / "model.json", facts)
    write_card(directory, bundle, to, facts, card)
    return path


def describe_for_timm(bundle: Bundle, model: VisionTransformer) -> dict[str, Any]:
    """timm's config.json: one of its architectures (for swiglu one that has it: JSON can't name a class of MLP) or that
    of timm_vit.py, its arguments and the preprocessing. Raises ValueError naming the first thing that timm doesn't
    have."""
    ours, preprocess = model.architecture, bundle.preprocess.to_dict()
    absent = {
        f"global_pool {ours['global_pool']!r}": ours["global_pool"] == "attention",
        "distilled with registers": ours["distilled"] and ours["reg_tokens"] > 0,
        "distilled without learned positions": ours["distilled"] and ours["pos_embed"] == "none",
        "distilled without positions of the prefix tokens": ours["distilled"] and ours["no_embed_class"],
    }
    for what in (what for what, is_used in absent.items() if is_used):
        raise ValueError(f"timm's VisionTransformer has no {what}; export to onnx or torch-export instead")
    is_plain = ours["stem"] == "patch" and ours["mlp"] in (("gelu",) if ours["distilled"] else ("gelu", "swiglu"))
    base = {"distilled": "deit_base_distilled_patch16_224", "swiglu": "vit_giant_patch14_dinov2"}
    architecture = base.get("distilled" if ours["distilled"] else ours["mlp"], "vit_base_patch16_224")
    classes, embedding = model.num_classes, model.patch_embed
    # timm cuts the product of width and ratio off, ours rounds it
    mlp_ratio = (round(model.embed_dim * ours["mlp_ratio"]) + 0.5) / model.embed_dim
    pos_embed = "none" if model.pos_embed is None else "learn"
    arguments = {name: value for name, value in ours.items() if name not in _NOT_IN_TIMM}
    arguments |= {"mlp_ratio": mlp_ratio, "global_pool": model.global_pool, "pos_embed": pos_embed}
    arguments |= {} if is_plain else {name: ours[name] for name in ("stem", "mlp", "distilled")}
    pretrained = {"input_size": [embedding.in_chans, *embedding.img_size], "fixed_input_size": True}
    pretrained |= {key: preprocess[key] for key in ("mean", "std", "crop_pct")} | {"crop_mode": "center"}
    pretrained |= {"interpolation": preprocess["interpolation"], "num_classes": classes}
    pretrained |= {"label_names": list(bundle.class_names), "pool_size": None, "first_conv": "patch_embed.proj"}
    pretrained["classifier"] = ["head", "head_dist"] if ours["distilled"] else "head"
    config = {"architecture": architecture if is_plain else "vit_with_stem", "num_classes": classes}
    config |= {"num_features": model.embed_dim, "global_pool": model.global_pool, "model_args": arguments}
    return config | {"pretrained_cfg": pretrained}


def describe_for_transformers(bundle: Bundle, timm: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """config.json and preprocessor_config.json of modeling_vit.py, from `describe_for_timm`."""
    model, preprocess = bundle.model, bundle.preprocess
    assert isinstance(model, VisionTransformer)
    arguments = {name: model.architecture[name] for name in ("stem", "mlp", "distilled")} | timm["model_args"]
    config = {"model_type": "vit_with_stem", "architectures": ["ViTForImageClassification"], "arguments": arguments}
    config |= {"logit_temperature": bundle.temperature, "dtype": "float32"}
    config |= {"problem_type": "single_label_classification"}
    config |= {"id2label": {str(index): name for index, name in enumerate(bundle.class_names)}}
    config |= {"label2id": {name: index for index, name in enumerate(bundle.class_names)}}
    classes = {"AutoConfig": "ViTConfig", "AutoModelForImageClassification": "ViTForImageClassification"}
    config["auto_map"] = {auto: f"modeling_vit.{name}" for auto, name in classes.items()}
    processor: dict[str, Any] = {"image_processor_type": "ViTProcessor"}
    processor |= {"auto_map": {"AutoImageProcessor": "modeling_vit.ViTProcessor"}}
    processor |= {"image_size": preprocess.image_size, "resize_size": preprocess.resize_size}
    processor |= {"resample": {"bilinear": 2, "bicubic": 3}[preprocess.interpolation]}  # Pillow's numbers
    return config, processor | {"image_mean": preprocess.mean, "image_std": preprocess.std}


def _export_onnx(
    bundle: Bundle, path: Path, options: OnnxOptions, images: DecodedDataset | None, facts: dict[str, Any]
) -> dict[str, Any]:
    """Write model.onnx with `facts` and, for pixels, predict.py; more facts, measured where there are images."""
    how: dict[str, Any] = {"preprocess": bundle.preprocess, "temperature": bundle.temperature}
    found: dict[str, Any] = {"input": options.input, "precision": options.precision}
    found["attention"] = options.maps is not None
    files: dict[WeightPrecision, Path] = {"float32": path.with_name(".float32.onnx"), options.precision: path}
    for precision, file in files.items():
        if precision == "int8":
            quantise_onnx(files["float32"], file)
        else:
            write_onnx(file, bundle.model, replace(options, precision=precision), **how)
    if images is not None:
        top1 = {}
        for precision, file in files.items():
            of_file = replace(options, precision=precision)
            top1[precision] = measure_top1(file, of_file, images, preprocess=bundle.preprocess)
        measured = {"data": images.name, "split": images.split, "num_images": len(images)}
        found["accuracy"] = {"top1": top1, **measured, "fingerprint": images.fingerprint}
    for file in set(files.values()) - {path}:
        file.unlink()
    write_onnx_metadata(path, facts | found)
    if options.input != "normalised":
        shutil.copyfile(TEMPLATES / "predict.py", path.with_name("predict.py"))
    return found


def _save_program(model: VisionTransformer, path: Path) -> None:
    images = next(model.parameters()).new_zeros(2, model.patch_embed.in_chans, *model.patch_embed.img_size)
    with path.open("wb") as file:  # given a path, torch adds a suffix to it
        torch.export.save(trace(model, images, ["batch"]), file)


def _write_weights(model: VisionTransformer, path: Path, *, prefix: str) -> None:
    positions = {} if model.pos_embed is None else {"pos_embed": model.pos_embed}
    weights = model.state_dict() | positions
    state = {prefix + name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()}
    write_atomically(path, lambda temporary: save_file(state, temporary, metadata={"format": "pt"}))


def _write_json(path: Path, values: dict[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")
