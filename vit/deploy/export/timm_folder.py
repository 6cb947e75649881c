"""A model as a folder that timm opens, and transformers of Hugging Face by its wrapper of timm."""

from typing import Any

from safetensors.torch import save

from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.model.model_file import MODEL_FILE, StateDict
from vit.model.vision_transformer import VisionTransformer
from vit.runtime.files import FileContent, format_json

# our arguments that the folder says elsewhere, or that timm lacks or gives another value
_NOT_ARGUMENTS = (
    *("stem", "mlp", "mlp_ratio", "pos_embed"),
    *("num_classes", "drop_path_rate", "attention_backend"),
)


def build_timm_files(bundle: Bundle) -> dict[str, FileContent]:
    """Build the folder. Fixed sine-cosine positions become learned ones of the same values. Raises
    ValueError if timm has no such architecture, or no such preprocessing."""
    model, preprocess = bundle.model, bundle.preprocess
    assert isinstance(model, VisionTransformer)
    if preprocess.resize_mode != "crop" or preprocess.value_range is not None:
        raise ValueError("--format timm is for centre crops of images of 8 bits; use --format onnx")
    weights = _fold_temperature(model, bundle.temperature)
    config = _describe_for_timm(model, preprocess)
    # timm's models give logits; `vit` and transformers read the names and the task
    kind = "multi_label" if bundle.is_multilabel else "single_label"
    config |= {"label_names": bundle.class_names, "problem_type": f"{kind}_classification"}
    tensors = {name: weight.contiguous() for name, weight in weights.items()}
    # transformers requires the format
    content = save(tensors, {"format": "pt"})
    return {MODEL_FILE: content, "config.json": format_json(config)}


def _describe_for_timm(model: VisionTransformer, preprocess: Preprocess) -> dict[str, Any]:
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
        "num_classes": model.num_classes,
        "model_args": arguments,
        "pretrained_cfg": {
            "input_size": [model.patch_embed.in_chans, *model.patch_embed.img_size],
            "fixed_input_size": True,
            "mean": preprocess.mean,
            "std": preprocess.std,
            "crop_pct": preprocess.crop_pct,
            "interpolation": preprocess.interpolation,
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
