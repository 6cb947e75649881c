"""Small models, with random weights, of families whose attention isn't that of a vision transformer.
docs/generate.py makes the table of families from this list."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import timm
import torch
import transformers
from torch import nn

from vit.explanation.capture.forward import settle_source
from vit.explanation.capture.reader import ModelReader

# how the output of the layer that grad-cam reads is arranged; tokens may have prefix tokens
Order = Literal["channels first", "channels last", "tokens", "1 and tokens", ""]
NUM_CLASSES = 5
_SEES_ALL = ("levit_128s", "levit_conv_128s", "tiny_vit_5m_224", "mobilevit_xxs", "mobilevitv2_050")
_SEES_ALL += ("swinv2_tiny_window8_256", "fastvit_t8", "MobileViTForImageClassification")
_SEES_ALL += ("MobileViTV2ForImageClassification", "MobileNetV2ForImageClassification")
_SEES_ALL += ("visformer_tiny", "mobilenetv3_small_050", "ResNetForImageClassification")


@dataclass(frozen=True)
class Family:
    """A model, the layer whose output grad-cam reads ("" without one), and how that is arranged."""

    library: str
    name: str
    build: Callable[[], nn.Module]
    layer: str
    order: Order
    size: int = 64

    @property
    def has_local_places(self) -> bool:
        """False if each place of the layer sees the whole image, with random weights."""
        return bool(self.layer) and self.name not in _SEES_ALL

    def make(self) -> nn.Module:
        """Build it in evaluation mode; layers that begin at zero get weights."""
        torch.manual_seed(0)
        model = self.build().eval()
        for parameter in model.parameters():
            if parameter.ndim > 1 and not parameter.any():
                nn.init.normal_(parameter, std=0.02)
        return model


def _timm(
    name: str, layer: str = "", order: Order = "channels first", size: int = 64, **arguments: Any
) -> Family:
    build = partial(timm.create_model, name, num_classes=NUM_CLASSES, **arguments)
    return Family("timm", name, build, layer, order, size)


def _hugging_face(
    name: str, layer: str = "", order: Order = "channels first", size: int = 64, **arguments: Any
) -> Family:
    title = f"{name}ForImageClassification"

    def build() -> nn.Module:
        configuration = getattr(transformers, f"{name}Config")
        model: nn.Module = getattr(transformers, title)(
            configuration(num_labels=NUM_CLASSES, **arguments)
        )
        return model

    return Family("Hugging Face", title, build, layer, order, size)


_IMAGE = {"img_size": 64}
_HF_IMAGE = {"image_size": 64}
_STAGES: dict[str, Any] = {"hidden_sizes": [8, 8, 16, 16], "depths": [1, 1, 1, 1]}
_HEADS = {"num_attention_heads": [1, 1, 2, 2]}
_SWIN: dict[str, Any] = {"window_size": 2, "embed_dim": 12, "depths": [1, 1, 1]}
_VIT = {"img_size": 64, "depth": 2, "embed_dim": 24, "num_heads": 3}
FAMILIES = [
    _timm("hiera_tiny_224", "blocks.11", "tokens", img_size=(64, 64)),
    _timm("mvitv2_tiny", "stages.1.blocks.0", "tokens", img_size=64),
    _timm("twins_svt_small", "pos_block.3.proj", **_IMAGE, depths=(1, 1, 2, 1)),
    _timm("twins_pcpvt_small", "pos_block.3.proj", **_IMAGE, depths=(1, 1, 1, 1)),
    _timm("levit_128s", "stages.0", "tokens", **_IMAGE),
    _timm("levit_conv_128s", "stages.1", **_IMAGE),
    _timm("cait_xxs24_224", "blocks", "tokens", **_IMAGE, depth=2),
    _timm("xcit_nano_12_p16_224", "blocks.0", "tokens", **_IMAGE, depth=2),
    _timm("volo_d1_224", "network.4", "channels last", **_IMAGE),
    _timm("coat_lite_tiny", "patch_embed4.proj", **_IMAGE),
    _timm("convit_tiny", "blocks.1", "tokens", **_IMAGE, depth=3, local_up_to_layer=2),
    _timm("tnt_s_patch16_224", **_IMAGE, depth=2),
    _timm("pvt_v2_b0", "stages", depths=(1, 1, 1, 1)),
    _timm("efficientformer_l1", "norm", "tokens", size=224, depths=(1, 1, 1, 2)),
    _timm("efficientformerv2_s0", "norm", size=224, depths=(1, 1, 1, 1)),
    _timm("mixer_s32_224", "norm", "tokens", **_IMAGE),
    _timm("gmlp_s16_224", "norm", "tokens", **_IMAGE),
    _timm("resmlp_12_224", "norm", "tokens", **_IMAGE),
    _timm("tiny_vit_5m_224", "stages"),
    _timm("visformer_tiny", "norm", **_IMAGE),
    _timm("mobilevit_xxs", "final_conv"),
    _timm("mobilevitv2_050", "final_conv"),
    _timm(
        "swin_tiny_patch4_window7_224",
        "norm",
        "channels last",
        **_IMAGE,
        **_SWIN,
        num_heads=(1, 1, 1),
    ),
    _timm(
        "swinv2_tiny_window8_256", "norm", "channels last", **_IMAGE, **_SWIN, num_heads=(1, 1, 1)
    ),
    _timm("davit_tiny", "norm_pre", depths=(1, 1, 1, 1)),
    _timm("maxvit_rmlp_pico_rw_256", "norm", **_IMAGE),
    _timm("coatnet_pico_rw_224", "norm", **_IMAGE),
    _timm("nest_tiny", "norm", "channels last", **_IMAGE),
    _timm("crossvit_9_240", size=240, depth=((1, 1, 0), (1, 1, 0), (1, 1, 0))),
    _timm("pit_ti_224", "transformers.1.blocks.2", "1 and tokens", **_IMAGE),
    _timm("samvit_base_patch16_224", "neck", **_VIT, global_attn_indexes=(1,)),
    _timm("vit_relpos_small_patch16_224", "norm", "tokens", **_VIT),
    _timm("fastvit_t8", "final_conv"),
    _timm("nextvit_small", "norm"),
    _timm("edgenext_xx_small", "norm_pre"),
    _timm("focalnet_tiny_srf", "norm"),
    _timm("efficientvit_b0", "head.in_conv"),
    _timm("poolformer_s12", "stages"),
    _timm("caformer_s18", "stages"),
    _timm("gcvit_xxtiny", "stages", size=224),
    _timm("sequencer2d_s", "norm", "channels last", layers=(1, 1, 1, 1)),
    _timm("swiftformer_xs", "norm"),
    _timm("test_resnet", "layer4"),
    _timm("convnext_atto", "norm_pre", depths=(1, 1, 1, 1)),
    _timm("test_efficientnet", "bn2"),
    _timm("densenet121", "features", block_config=(2, 2, 2, 2)),
    _timm("mobilenetv3_small_050", "blocks"),
    _hugging_face("Swin", "swin.layernorm", "tokens", **_HF_IMAGE, **_SWIN, num_heads=[1, 1, 1]),
    _hugging_face(
        "Swinv2", "swinv2.layernorm", "tokens", **_HF_IMAGE, **_SWIN, num_heads=[1, 1, 1]
    ),
    _hugging_face(
        "Hiera",
        "hiera.encoder.stages.3",
        "tokens",
        size=224,
        embed_dim=12,
        depths=[1] * 4,
        num_heads=[1] * 4,
    ),
    _hugging_face(
        "Pvt", "pvt.encoder.patch_embeddings.3", "1 and tokens", **_HF_IMAGE, **_STAGES, **_HEADS
    ),
    _hugging_face(
        "PvtV2", "pvt_v2.encoder.layers.3.layer_norm", "tokens", **_HF_IMAGE, **_STAGES, **_HEADS
    ),
    _hugging_face(
        "Cvt",
        "cvt.encoder.stages.2.layers.1",
        "1 and tokens",
        embed_dim=[8, 16, 24],
        num_heads=[1, 1, 1],
        depth=[1, 2, 3],
        patch_sizes=[7, 3, 3],
    ),
    _hugging_face(
        "Levit",
        "levit.encoder.stages.0.layers.1",
        "tokens",
        **_HF_IMAGE,
        hidden_sizes=[16, 24, 32],
        depths=[1, 1, 1],
    ),
    _hugging_face(
        "FocalNet",
        "focalnet.layernorm",
        "tokens",
        **_HF_IMAGE,
        embed_dim=12,
        depths=[1, 1, 1],
        hidden_sizes=[12, 24, 48],
    ),
    _hugging_face("MobileViT", "mobilevit.conv_1x1_exp", **_HF_IMAGE),
    _hugging_face("MobileViTV2", "mobilevitv2.encoder.layer.4", **_HF_IMAGE),
    _hugging_face("Segformer", "segformer.stages.3", **_STAGES, **_HEADS),
    _hugging_face("ConvNext", "convnext.encoder.stages.3", **_STAGES),
    _hugging_face("ConvNextV2", "convnextv2.encoder.stages.3", **_STAGES),
    _hugging_face(
        "ResNet", "resnet.encoder.stages.3", **_STAGES, embedding_size=8, layer_type="basic"
    ),
    _hugging_face("RegNet", "regnet.encoder.stages.3", **_STAGES, groups_width=4),
    _hugging_face("PoolFormer", "norm", **_STAGES),
    _hugging_face("SwiftFormer", "norm", **_HF_IMAGE, embed_dims=[8, 8, 16, 16], depths=[1] * 4),
    _hugging_face("MobileNetV2", "mobilenet_v2.conv_1x1"),
    _hugging_face(
        "Data2VecVision",
        "data2vec_vision.layernorm",
        "1 and tokens",
        **_HF_IMAGE,
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
    ),
]


# How the refusal of attention maps reads, and the words of the table.
_REASONS = {
    "is hierarchical|attends within windows|attends between": (
        "attends within windows or branches, or merges patches"
    ),
    "has no attention between all": "has no attention between all of its tokens",
    "isn't of batches and heads|isn't added to|were not captured": (
        "arranges its tokens or heads differently"
    ),
    "mixes tokens elsewhere|tokens of .* are mixed|isn't between the tokens": (
        "mixes tokens outside its attention"
    ),
    "reads something other than the tokens|don't contain the tokens": (
        "leads information around its blocks"
    ),
    "computes something else than softmax": "computes something other than a softmax times values",
}


def describe_family(family: Family) -> str:
    """Return the first cell of its row in the table of families: why there are no attention maps."""
    reader = ModelReader(family.make())
    generator = torch.Generator().manual_seed(0)
    settle_source(reader, torch.randn(1, 3, family.size, family.size, generator=generator))
    if reader.source == "attention":
        return "has attention that can be read: all methods"
    if reader.source == "pixels":
        assert "reads something other" in reader.explain_refusal("feature map")
        return "reads several feature maps: methods of pixels only"
    refusal = reader.explain_refusal("attention")
    (reason,) = (words for start, words in _REASONS.items() if re.search(start, refusal))
    return reason


def name_family(family: Family) -> str:
    """Return the name of the model in the table."""
    return f"`{family.name.removesuffix('ForImageClassification')}`"
