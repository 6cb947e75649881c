"""A model for other programs: a folder with ONNX, for timm or for transformers."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from safetensors.torch import save_file
from torch import nn

from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.deploy.export.onnx_file import WeightPrecision, check_packages, export_onnx
from vit.model import stem
from vit.model.model_file import MODEL_FILE
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import prepare_output, write_atomically, write_text

Form = Literal["onnx", "timm", "huggingface"]
TEMPLATES = Path(__file__).parent / "templates"
# the architecture of timm_vit.py, for what timm doesn't have
_OURS = "vit_with_stem"
# (stem, mlp, distilled) → one of timm's architectures that has them, as its JSON can't name a class
# of MLP
_TIMM_ARCHITECTURES = {
    ("patch", "gelu", False): "vit_base_patch16_224",
    ("patch", "swiglu", False): "vit_giant_patch14_dinov2",
    ("patch", "gelu", True): "deit_base_distilled_patch16_224",
}
# what that architecture says, and what timm doesn't have or gives another value
_NOT_ARGUMENTS = {
    "stem",
    "mlp",
    "distilled",
    "mlp_ratio",
    "pos_embed",
    "drop_path_rate",
    "attention_backend",
}


def export_bundle(
    bundle: Bundle,
    to: Form,
    directory: Path,
    *,
    precision: WeightPrecision,
    with_maps: nn.Module | None,
    images: ImageDataset | None,
    overwrite: bool,
) -> Path:
    """Write a model for other programs.

    Args:
        bundle: Of our VisionTransformer.
        to: "onnx": model.onnx, model.json with the preprocessing, and predict.py. "timm": the
            folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens, after
            `import timm_vit` where that file is in it; fixed sine-cosine positions become learned
            ones of the same values. "huggingface": what transformers opens with
            `trust_remote_code=True`.
        directory: Where it goes.
        precision, with_maps, images: Of ONNX, as in `export_onnx`; the images have labels of the
            model's classes.
        overwrite: Replace an earlier export.

    Returns:
        The directory, or the path of model.onnx.

    Raises:
        ValueError: without the packages of ONNX.
        FileExistsError: where the directory holds something that isn't to be replaced.
    """
    # before an earlier export is replaced
    if to == "onnx":
        check_packages()
    prepare_output(directory, overwrite=overwrite)

    if to == "onnx":
        facts = export_onnx(
            bundle, directory, precision=precision, with_maps=with_maps, images=images
        )
        _write_json(directory / "model.json", facts)
        shutil.copyfile(TEMPLATES / "predict.py", directory / "predict.py")
        return directory / "model.onnx"

    # what timm doesn't have comes as code beside the weights, as transformers' own code always does
    timm_config = describe_for_timm(bundle)
    if to == "huggingface" or timm_config["architecture"] == _OURS:
        code = (TEMPLATES / "timm_vit.py").read_text(encoding="utf-8")
        stem_code = Path(stem.__file__).read_text(encoding="utf-8")
        code = code.replace("from vit.model.stem import build_stem\n", stem_code)
        write_text(directory / "timm_vit.py", code)
    if to == "huggingface":
        shutil.copyfile(TEMPLATES / "modeling_vit.py", directory / "modeling_vit.py")
        _write_weights(bundle, directory / MODEL_FILE, prefix="vit.")
        _write_transformers_configs(bundle, directory, timm_config)
    else:
        _write_weights(bundle, directory / MODEL_FILE, prefix="")
        _write_json(directory / "config.json", timm_config)
    return directory


def describe_for_timm(bundle: Bundle) -> dict[str, Any]:
    """timm's config.json: one of its architectures or that of timm_vit.py, its arguments and the
    preprocessing."""
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    architecture = model.architecture
    variant = {name: architecture[name] for name in ("stem", "mlp", "distilled")}
    timm_architecture = _TIMM_ARCHITECTURES.get(tuple(variant.values()), _OURS)

    arguments = {name: value for name, value in architecture.items() if name not in _NOT_ARGUMENTS}
    # timm cuts the product of width and ratio off, ours rounds it
    hidden_dim = round(model.embed_dim * architecture["mlp_ratio"])
    arguments["mlp_ratio"] = (hidden_dim + 0.5) / model.embed_dim
    if timm_architecture == _OURS:
        arguments |= variant

    # what `timm.create_model` and `timm.data.resolve_model_data_config` read
    preprocess = bundle.preprocess
    return {
        "architecture": timm_architecture,
        "num_classes": model.num_classes,
        "num_features": model.embed_dim,
        "global_pool": model.global_pool,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [model.patch_embed.in_chans, *model.patch_embed.img_size],
            "fixed_input_size": True,
            "mean": preprocess.mean,
            "std": preprocess.std,
            "crop_pct": preprocess.crop_pct,
            "crop_mode": "center",
            "interpolation": preprocess.interpolation,
            "num_classes": model.num_classes,
            "label_names": bundle.class_names,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if architecture["distilled"] else "head",
        },
    }


def _write_transformers_configs(
    bundle: Bundle, directory: Path, timm_config: Mapping[str, Any]
) -> None:
    """config.json and preprocessor_config.json of modeling_vit.py."""
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    ours = {name: model.architecture[name] for name in ("stem", "mlp", "distilled")}
    config = {
        "model_type": _OURS,
        "architectures": ["ViTForImageClassification"],
        "arguments": ours | timm_config["model_args"],
        "logit_temperature": bundle.temperature,
        "dtype": "float32",
        "problem_type": "single_label_classification",
        "id2label": dict(enumerate(bundle.class_names)),
        "label2id": {name: index for index, name in enumerate(bundle.class_names)},
        "auto_map": {
            "AutoConfig": "modeling_vit.ViTConfig",
            "AutoModelForImageClassification": "modeling_vit.ViTForImageClassification",
        },
        "custom_pipelines": {
            "image-classification": {
                "impl": "modeling_vit.ViTPipeline",
                "pt": ["AutoModelForImageClassification"],
                "type": "image",
            }
        },
    }
    _write_json(directory / "config.json", config)

    preprocess = bundle.preprocess
    processor = {
        "image_processor_type": "ViTProcessor",
        "auto_map": {"AutoImageProcessor": "modeling_vit.ViTProcessor"},
        "image_size": preprocess.image_size,
        "resize_size": preprocess.resize_size,
        "resample": {"bilinear": 2, "bicubic": 3}[preprocess.interpolation],  # Pillow's numbers
        "image_mean": preprocess.mean,
        "image_std": preprocess.std,
    }
    _write_json(directory / "preprocessor_config.json", processor)


def _write_weights(bundle: Bundle, path: Path, *, prefix: str) -> None:
    # fixed positions are not in ours, and learned ones of the same values in timm's
    weights = bundle.model.state_dict() | {"pos_embed": bundle.model.pos_embed}
    tensors = {
        prefix + name: tensor.detach().cpu().contiguous() for name, tensor in weights.items()
    }
    # transformers asks for the format
    write_atomically(path, lambda temporary: save_file(tensors, temporary, {"format": "pt"}))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")
