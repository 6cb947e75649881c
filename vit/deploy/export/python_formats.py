"""A model as a folder that timm or transformers of Hugging Face opens."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save

from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.huggingface_weights import convert_to_huggingface
from vit.model.model_file import MODEL_FILE, StateDict
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import format_json, write_atomically

# our `mlp` → an architecture of timm that has it: its JSON can't name an MLP class
_TIMM_ARCHITECTURES = {"gelu": "vit_base_patch16_224", "swiglu": "vit_giant_patch14_dinov2"}
# our arguments that the architecture already says, or that timm lacks or gives another value
_NOT_ARGUMENTS = ("stem", "mlp", "mlp_ratio", "pos_embed", "drop_path_rate", "attention_backend")
# Pillow's numbers
_RESAMPLE = {"bilinear": 2, "bicubic": 3}
# weights, and the content of each JSON file beside them
Folder = tuple[StateDict, Mapping[str, Any]]


def convert_to_timm(bundle: Bundle) -> Folder:
    """Return the folder that `timm.create_model("local-dir:FOLDER", pretrained=True)` opens. Fixed
    sine-cosine positions become learned ones of the same values.

    Raises:
        ValueError: timm has no such architecture.
    """
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    architecture = model.architecture
    name = _TIMM_ARCHITECTURES.get(architecture["mlp"])
    if name is None or architecture["stem"] != "patch":
        raise ValueError(
            f"timm has no model with stem {architecture['stem']} and MLP {architecture['mlp']};"
            " use --format onnx"
        )
    arguments = {name: value for name, value in architecture.items() if name not in _NOT_ARGUMENTS}
    # timm truncates the product of width and ratio, ours rounds it
    hidden_dim = round(model.embed_dim * architecture["mlp_ratio"])
    arguments["mlp_ratio"] = (hidden_dim + 0.5) / model.embed_dim

    # `timm.create_model` and `timm.data.resolve_model_data_config` read this
    preprocess = bundle.preprocess
    is_crop = preprocess.resize_mode == "crop"
    # timm's border has the mean colour, too
    crop_mode = {"crop": "center", "pad": "border", "stretch": "squash"}[preprocess.resize_mode]
    config: dict[str, Any] = {
        "architecture": name,
        "num_classes": model.num_classes,
        "num_features": model.embed_dim,
        "global_pool": model.global_pool,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [model.patch_embed.in_chans, *model.patch_embed.img_size],
            "fixed_input_size": True,
            "mean": preprocess.mean,
            "std": preprocess.std,
            "crop_pct": preprocess.crop_pct if is_crop else 1.0,
            "crop_mode": crop_mode,
            "interpolation": preprocess.interpolation,
            "num_classes": model.num_classes,
            "label_names": bundle.class_names,
            "pool_size": None,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }
    if bundle.is_multilabel or bundle.operating_point:
        # timm doesn't read this: its models give logits
        config |= _describe_task(bundle)
    return _fold_temperature(bundle), {"config.json": config}


def convert_to_transformers(bundle: Bundle) -> Folder:
    """Return the folder that transformers opens with its own ViT or DINOv2 and image processor.

    Raises:
        ValueError: transformers has no such architecture, or no such preprocessing.
    """
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    converted = convert_to_huggingface(model, _fold_temperature(bundle))
    if converted is None:
        raise ValueError("transformers has no model of this architecture; use --format onnx")
    weights, config = converted
    config |= {
        "dtype": "float32",
        **_describe_task(bundle),
        "id2label": dict(enumerate(bundle.class_names)),
        "label2id": {name: index for index, name in enumerate(bundle.class_names)},
    }
    processor = _describe_processor(bundle.preprocess)
    return weights, {"config.json": config, "preprocessor_config.json": processor}


def write_folder(folder: Folder, directory: Path) -> None:
    """Write the files of a folder."""
    weights, documents = folder
    tensors = {name: tensor.contiguous() for name, tensor in weights.items()}
    path = directory / MODEL_FILE
    # transformers requires the format
    write_atomically(path, save(tensors, {"format": "pt"}))
    for name, content in documents.items():
        write_atomically(directory / name, format_json(content))


def _describe_processor(preprocess: Preprocess) -> dict[str, Any]:
    """Return what makes transformers' own processor resize like this but for rounded sizes."""
    if preprocess.value_range is not None:
        raise ValueError("transformers cuts values of more than 8 bits off; use --format onnx")
    height, width = preprocess.image_size
    size = {"height": height, "width": width}
    if preprocess.resize_mode == "stretch":
        steps: dict[str, Any] = {"image_processor_type": "ViTImageProcessor", "size": size}
    elif preprocess.resize_mode == "crop" and height == width:
        edge = {"shortest_edge": preprocess.resize_size[0]}
        steps = {"image_processor_type": "BitImageProcessor", "size": edge, "crop_size": size}
    else:
        raise ValueError(
            f"transformers has no resize mode {preprocess.resize_mode} to {height}×{width} pixels;"
            " use --format onnx"
        )
    return steps | {
        "resample": _RESAMPLE[preprocess.interpolation],
        "image_mean": preprocess.mean,
        "image_std": preprocess.std,
    }


def _describe_task(bundle: Bundle) -> dict[str, Any]:
    """Return the keys that say how logits become probabilities, and these what is predicted."""
    kind = "multi_label" if bundle.is_multilabel else "single_label"
    task: dict[str, Any] = {"problem_type": f"{kind}_classification"}
    if bundle.operating_point:
        task["operating_point"] = bundle.operating_point
    return task


def _fold_temperature(bundle: Bundle) -> StateDict:
    """Return the weights of a model that gives the logits divided by the temperature."""
    # our state has no fixed positions; others have learned ones of the same values
    model = bundle.model
    assert isinstance(model, VisionTransformer)
    weights = model.state_dict() | {"pos_embed": model.pos_embed.detach()}
    for name, tensor in weights.items():
        weights[name] = tensor = tensor.cpu()
        if name.startswith("head."):
            weights[name] = (tensor.double() / bundle.temperature).to(tensor.dtype)
    return weights
