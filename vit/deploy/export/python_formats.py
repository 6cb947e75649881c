"""A model as a folder that timm or transformers of Hugging Face opens."""

from typing import Any

from safetensors.torch import save

from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.huggingface_weights import convert_to_huggingface
from vit.model.model_file import MODEL_FILE, StateDict
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import FileContent, format_json

# our arguments that the architecture already says, or that timm lacks or gives another value
_NOT_ARGUMENTS = ("stem", "mlp", "mlp_ratio", "pos_embed", "drop_path_rate", "attention_backend")
# Pillow's numbers
_RESAMPLE = {"bilinear": 2, "bicubic": 3}


def build_folder_files(bundle: Bundle, library: str) -> dict[str, FileContent]:
    """Build a folder that a library opens: "timm", or "huggingface" by transformers' own ViT and
    image processor. Fixed sine-cosine positions become learned ones of the same values.

    Raises ValueError if the library has no such architecture, or no such preprocessing.
    """
    model, preprocess = bundle.model, bundle.preprocess
    assert isinstance(model, VisionTransformer)
    if preprocess.resize_mode != "crop" or preprocess.value_range is not None:
        raise ValueError(
            f"--format {library} is for centre crops of images of 8 bits; use --format onnx"
        )
    weights = _fold_temperature(model, bundle.temperature)
    kind = "multi_label" if bundle.is_multilabel else "single_label"
    task = {"problem_type": f"{kind}_classification"}
    if library == "timm":
        # timm's models give logits; `vit` reads the task
        config = _describe_for_timm(model, preprocess, bundle.class_names) | task
        return {MODEL_FILE: _pack(weights), "config.json": format_json(config)}

    converted = convert_to_huggingface(model, weights)
    if converted is None or len(set(preprocess.image_size)) > 1:
        raise ValueError("transformers has no ViT of this architecture; use --format onnx")
    weights, config = converted
    config |= {
        "dtype": "float32",
        **task,
        "id2label": dict(enumerate(bundle.class_names)),
        "label2id": {name: index for index, name in enumerate(bundle.class_names)},
    }
    height, width = preprocess.image_size
    # it resizes like `vit` but for rounded sizes
    processor = {
        "image_processor_type": "BitImageProcessor",
        "size": {"shortest_edge": preprocess.resize_size[0]},
        "crop_size": {"height": height, "width": width},
        "resample": _RESAMPLE[preprocess.interpolation],
        "image_mean": preprocess.mean,
        "image_std": preprocess.std,
    }
    return {
        MODEL_FILE: _pack(weights),
        "config.json": format_json(config),
        "preprocessor_config.json": format_json(processor),
    }


def _pack(weights: StateDict) -> bytes:
    # transformers requires the format
    return save({name: weight.contiguous() for name, weight in weights.items()}, {"format": "pt"})


def _describe_for_timm(
    model: VisionTransformer, preprocess: Preprocess, class_names: tuple[str, ...]
) -> dict[str, Any]:
    """Return what `timm.create_model` and `timm.data.resolve_model_data_config` read."""
    architecture = model.architecture
    # its JSON can't name the class of an MLP
    if (architecture["mlp"], architecture["stem"]) != ("gelu", "patch"):
        raise ValueError(
            f"timm has no model with stem {architecture['stem']} and MLP {architecture['mlp']};"
            " use --format onnx"
        )
    arguments = {name: value for name, value in architecture.items() if name not in _NOT_ARGUMENTS}
    # timm truncates the product of width and ratio, ours rounds it
    hidden_dim = round(model.embed_dim * architecture["mlp_ratio"])
    arguments["mlp_ratio"] = (hidden_dim + 0.5) / model.embed_dim
    return {
        "architecture": "vit_base_patch16_224",
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [model.patch_embed.in_chans, *model.patch_embed.img_size],
            "fixed_input_size": True,
            "mean": preprocess.mean,
            "std": preprocess.std,
            "crop_pct": preprocess.crop_pct,
            "interpolation": preprocess.interpolation,
            "num_classes": model.num_classes,
            "label_names": class_names,
            "first_conv": "patch_embed.proj",
            "classifier": "head",
        },
    }


def _fold_temperature(model: VisionTransformer, temperature: float) -> StateDict:
    """Return the weights of a model that gives the logits divided by the temperature."""
    # our state has no fixed positions; others have learned ones of the same values
    weights = model.state_dict() | {"pos_embed": model.pos_embed.detach()}
    for name, tensor in weights.items():
        weights[name] = tensor = tensor.cpu()
        if name.startswith("head."):
            weights[name] = (tensor.double() / temperature).to(tensor.dtype)
    return weights
