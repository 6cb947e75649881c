"""A model for timm and for transformers of Hugging Face."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.huggingface_weights import convert_to_huggingface
from vit.model.model_file import MODEL_FILE, StateDict
from vit.model.vision_transformer import VisionTransformer
from vit.prediction.conformal import MAX_P_UNUSUAL
from vit.runtime.files import write_atomically, write_text

TEMPLATES = Path(__file__).parent / "templates"
_OUR_IMPORT = re.compile(r"^from (vit\..+) import .*\n", re.MULTILINE)
# the architecture in timm_vit.py, used where timm has none
_OURS = "vit_with_stem"
_VARIANT = ("stem", "mlp", "distilled")
# their values → an architecture of timm that has them: its JSON can't name an MLP class
_TIMM_ARCHITECTURES = {
    ("patch", "gelu", False): "vit_base_patch16_224",
    ("patch", "swiglu", False): "vit_giant_patch14_dinov2",
    ("patch", "gelu", True): "deit_base_distilled_patch16_224",
}
# our arguments that the architecture already says, or that timm lacks or gives another value
_NOT_ARGUMENTS = {
    *_VARIANT,
    "mlp_ratio",
    "pos_embed",
    "drop_path_rate",
    "attention_backend",
}


def export_timm(bundle: Bundle, directory: Path) -> Path:
    """Write the folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens, after
    `import timm_vit` where that file is in it. Fixed sine-cosine positions become learned ones of
    the same values."""
    config = _describe_for_timm(bundle)
    if bundle.is_multilabel or bundle.operating_point:
        # timm doesn't read this: its models give logits
        config |= _describe_task(bundle)
    if config["architecture"] == _OURS:
        write_program(directory / "timm_vit.py")
    _write_weights(_fold_temperature(bundle), directory / MODEL_FILE)
    _write_json(directory / "config.json", config)
    write_program(directory / "read_image.py")
    return directory


def export_huggingface(bundle: Bundle, directory: Path) -> Path:
    """Write the folder that transformers opens: with its own ViT or DINOv2 and image processor where
    they compute the same, else by the code in the folder, with `trust_remote_code=True`."""
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    weights = _fold_temperature(bundle)
    classifier = "ViTForImageClassification"
    processor = _describe_processor(bundle.preprocess)
    converted = convert_to_huggingface(model, weights)
    # transformers' own pipeline knows no thresholds
    if converted and processor and not bundle.operating_point:
        weights, config = converted
    else:
        # transformers runs the code of the folder, and never that of this project
        write_program(directory / "timm_vit.py")
        write_program(directory / "modeling_vit.py")
        weights = {f"vit.{name}": tensor for name, tensor in weights.items()}
        # timm_vit.py takes these also where timm has an architecture of its own
        variant = {name: model.architecture[name] for name in _VARIANT}
        config = {
            "model_type": _OURS,
            "architectures": [classifier if bundle.class_names else "ViTModel"],
            "arguments": variant | _describe_for_timm(bundle)["model_args"],
            "auto_map": {
                "AutoConfig": "modeling_vit.ViTConfig",
                "AutoModel": "modeling_vit.ViTModel",
                "AutoModelForImageClassification": f"modeling_vit.{classifier}",
            },
            "custom_pipelines": {
                "image-classification": {
                    "impl": "modeling_vit.ViTPipeline",
                    "pt": ["AutoModelForImageClassification"],
                    "type": "image",
                }
            },
        }
        processor = {"image_processor_type": "ViTProcessor"}
    config |= {
        "dtype": "float32",
        **_describe_task(bundle),
        "id2label": dict(enumerate(bundle.class_names)),
        "label2id": {name: index for index, name in enumerate(bundle.class_names)},
    }
    _write_weights(weights, directory / MODEL_FILE)
    _write_json(directory / "config.json", config)

    # with `trust_remote_code=True`, the pixels are those of vit
    write_program(directory / "image_processing_vit.py")
    write_program(directory / "read_image.py")
    preprocess = bundle.preprocess
    processor |= {
        "auto_map": {"AutoImageProcessor": "image_processing_vit.ViTProcessor"},
        "image_size": preprocess.image_size,
        "resize_size": preprocess.resize_size,
        "resample": {"bilinear": 2, "bicubic": 3}[preprocess.interpolation],  # Pillow's numbers
        "image_mean": preprocess.mean,
        "image_std": preprocess.std,
        "resize_mode": preprocess.resize_mode,
        "ground": preprocess.ground,
        "value_range": preprocess.value_range,
    }
    _write_json(directory / "preprocessor_config.json", processor)
    return directory


def _describe_processor(preprocess: Preprocess) -> dict[str, Any] | None:
    """Return what makes transformers' own processor resize like this but for rounded sizes; None if
    it can't."""
    height, width = preprocess.image_size
    size = {"height": height, "width": width}
    if preprocess.resize_mode == "stretch" and preprocess.value_range is None:
        return {"image_processor_type": "ViTImageProcessor", "size": size}
    if preprocess.resize_mode == "pad" or preprocess.value_range or height != width:
        return None
    edge = {"shortest_edge": preprocess.resize_size[0]}
    return {"image_processor_type": "BitImageProcessor", "size": edge, "crop_size": size}


def _describe_task(bundle: Bundle) -> dict[str, Any]:
    """Return the keys that say how logits become probabilities, and these what is predicted."""
    kind = "multi_label" if bundle.is_multilabel else "single_label"
    task: dict[str, Any] = {"problem_type": f"{kind}_classification"}
    if bundle.operating_point:
        task["operating_point"] = bundle.operating_point
    return task


def write_program(path: Path) -> None:
    """Write the template of this name, with the code in it that it imports from this project."""
    code = (TEMPLATES / path.name).read_text(encoding="utf-8")
    limit = "from vit.prediction.conformal import MAX_P_UNUSUAL\n"
    code = code.replace(limit, f"\nMAX_P_UNUSUAL = {MAX_P_UNUSUAL}\n")
    while line := _OUR_IMPORT.search(code):
        file = TEMPLATES.parents[3].joinpath(*line[1].split(".")).with_suffix(".py")
        _, _, imported = file.read_text(encoding="utf-8").partition('"""\n\n')
        code = code.replace(line[0], imported)
    write_text(path, code)


def _describe_for_timm(bundle: Bundle) -> dict[str, Any]:
    """Return the content of timm's config.json: the architecture, its arguments, the preprocessing."""
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    architecture = model.architecture
    variant = {name: architecture[name] for name in _VARIANT}
    timm_architecture = _TIMM_ARCHITECTURES.get(tuple(variant.values()), _OURS)

    arguments = {name: value for name, value in architecture.items() if name not in _NOT_ARGUMENTS}
    # timm truncates the product of width and ratio, ours rounds it
    hidden_dim = round(model.embed_dim * architecture["mlp_ratio"])
    arguments["mlp_ratio"] = (hidden_dim + 0.5) / model.embed_dim
    if timm_architecture == _OURS:
        arguments |= variant

    # `timm.create_model` and `timm.data.resolve_model_data_config` read this
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
            "crop_pct": preprocess.crop_pct if preprocess.resize_mode == "crop" else 1.0,
            # timm's border has the mean colour, too
            "crop_mode": {"crop": "center", "pad": "border", "stretch": "squash"}[
                preprocess.resize_mode
            ],
            "interpolation": preprocess.interpolation,
            "num_classes": model.num_classes,
            "label_names": bundle.class_names,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": ["head", "head_dist"] if architecture["distilled"] else "head",
        },
    }


def _fold_temperature(bundle: Bundle) -> StateDict:
    """Return the weights of a model that gives the logits divided by the temperature."""
    # our state has no fixed positions; others have learned ones of the same values
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    weights = model.state_dict() | {"pos_embed": model.pos_embed.detach()}
    for name, tensor in weights.items():
        weights[name] = tensor = tensor.cpu()
        if name.startswith(("head.", "head_dist.")):
            weights[name] = (tensor.double() / bundle.temperature).to(tensor.dtype)
    return weights


def _write_weights(weights: StateDict, path: Path) -> None:
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    # transformers requires the format
    write_atomically(path, lambda temporary: save_file(tensors, temporary, {"format": "pt"}))


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(values, indent=2) + "\n")
