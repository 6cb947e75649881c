"""Every model of the list is read right, or refused in a sentence."""

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F

import vit
from tests.explanation.keep_tokens import keep_tokens
from tests.explanation.model_zoo import _HUGGING_FACE, MODELS, build, build_timm
from vit.bundle import Bundle
from vit.explanation.capture.forward import capture_attention, run_forward
from vit.explanation.capture.reader import read_model
from vit.explanation.methods.maps import compute_maps
from vit.model.logits import compute_logits

POSITIONS_IN_ATTENTION = {name for name in MODELS if "rotary" in name or "beit" in name}
POSITIONS_IN_ATTENTION |= {"timm-eva", "timm-perception-encoder", "hugging-face-dinov3"}


@pytest.mark.parametrize("name", MODELS)
def test_attention_is_what_the_model_computes_in_float64(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = build(name)
    with torch.no_grad(), capture_attention(model) as record:
        compute_logits(model, images)
        attentions = record.attentions
    weights: list[Tensor] = []

    def attend(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        scores = query @ key.transpose(-2, -1) * query.shape[-1] ** -0.5
        weights.append((scores if attn_mask is None else scores + attn_mask).softmax(dim=-1))
        return weights[-1] @ value

    model, images = model.double(), images.double()
    with monkeypatch.context() as patch:
        patch.setattr(F, "scaled_dot_product_attention", attend)
        compute_logits(model, images.requires_grad_())  # with gradients, no fused layer of torch
    # an attention pooling comes last
    assert len(attentions) <= len(weights) <= len(attentions) + 1
    for found, expected in zip(attentions, weights, strict=False):
        assert (found - expected).abs().max() < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_the_pool_weights_are_what_the_classifier_reads(name: str) -> None:
    model, images = build(name)
    forward = run_forward(model, images)
    torch.testing.assert_close(forward.logits, compute_logits(model, images).detach())
    first, pool_weights, reads = forward.num_prefix_tokens, forward.pool_weights, MODELS[name].reads
    assert (pool_weights.sum(dim=1) - 1).abs().max() < 1e-5
    prefix, patches = pool_weights[:, :first], pool_weights[:, first:]
    if reads == "class token":
        assert (prefix[:, 0] == 1).all()
    elif reads == "class and distillation token":
        assert (prefix > 0.3).all()
        assert not patches.any()
    elif "mean" in reads:
        assert (patches - patches[:, :1]).abs().max() < 1e-6
        assert (patches > 0).all()
        class_token = "class token" in reads
        assert bool(prefix[:, :1].any()) == class_token
        assert not prefix[:, 1:].any()
    else:
        assert patches.std() > 0


def test_the_grid_follows_an_input_of_another_size() -> None:
    model = build_timm(dynamic_img_size=True).eval()
    assert run_forward(model, torch.randn(1, 3, 128, 48)).grid == (8, 3)


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_left_out_where_the_attention_knows_no_positions(name: str) -> None:
    model, images = build(name)
    forward = run_forward(model, images)
    patches = forward.grid[0] * forward.grid[1]
    if name in POSITIONS_IN_ATTENTION:
        assert not read_model(model, images).can_drop_tokens
        return
    assert read_model(model, images).can_drop_tokens
    kept = torch.tensor([[5, 1, 7, 2], [0, 11, 3, 9]])
    logits = []
    for subset in (torch.arange(patches).expand(2, -1), kept, kept.flip(1)):
        with torch.no_grad(), keep_tokens(model, subset, images):
            logits.append(compute_logits(model, images))
    torch.testing.assert_close(logits[0], forward.logits)
    torch.testing.assert_close(logits[1], logits[2])  # positions stay with their patches
    assert (logits[1] - logits[0]).abs().max() > 1e-4


class ZeroShot(nn.Module):
    """CLIP's or SigLIP's model as a classifier of fixed texts, which run with each image or not."""

    def __init__(self, model: nn.Module, *, runs_texts: bool) -> None:
        super().__init__()
        self.model: Any = model
        self.runs_texts = runs_texts
        self.num_classes = 5
        texts = torch.randint(3, 90, (5, 8), generator=torch.Generator().manual_seed(0))
        self.register_buffer("texts", texts)

    def forward(self, images: Tensor) -> Tensor:
        if self.runs_texts:
            found = self.model(input_ids=self.texts, pixel_values=images)
            logits: Tensor = found.logits_per_image
            return logits
        with torch.no_grad():
            of_texts = self.model.get_text_features(input_ids=self.texts).pooler_output
        features = self.model.get_image_features(pixel_values=images).pooler_output
        features = features / features.norm(dim=-1, keepdim=True)
        of_texts = of_texts / of_texts.norm(dim=-1, keepdim=True)
        bias = getattr(self.model, "logit_bias", 0)
        return features @ of_texts.T * self.model.logit_scale.exp() + bias


@pytest.mark.parametrize("name", ["CLIP", "Siglip"])
def test_layers_that_see_texts_are_left_out(name: str) -> None:
    """The whole model has the maps of the same model whose texts don't run with the image."""
    sizes = {"num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    vision = sizes | {"hidden_size": 64, "image_size": 64, "patch_size": 16}
    text = sizes | {"hidden_size": 64, "vocab_size": 100, "max_position_embeddings": 16}
    config = getattr(transformers, f"{name}Config")(text_config=text, vision_config=vision)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}Model")(config).eval()
    images = torch.randn(2, 3, 64, 64)
    maps = [
        {
            method: vit.attribute(
                ZeroShot(model, runs_texts=runs), images, method=method, target=[1, 2]
            )
            for method in ("rollout", "gae", "libra-fullgrad")
        }
        for runs in (True, False)
    ]
    for method, found in maps[0].items():
        assert found.shape == (2, 4, 4)
        assert found.std() > 0
        torch.testing.assert_close(found, maps[1][method], rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")  # torch will move quantisation to another package
def test_maps_of_a_quantised_model_are_refused() -> None:
    model = transformers.ViTForImageClassification(transformers.ViTConfig(**_HUGGING_FACE)).eval()
    quantised = torch.ao.quantization.quantize_dynamic(model, {nn.Linear})
    names = [f"class {number}" for number in range(model.num_labels)]
    preprocess = vit.Preprocess((64, 64))
    bundle = Bundle.from_model(quantised, class_names=names, preprocess=preprocess)
    photo = np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    for methods in ("auto", "rollout"):
        with pytest.raises(ValueError, match="explain a quantised model before it is quantised"):
            vit.explain(bundle, photo, methods=methods)


@pytest.mark.parametrize("name", ["ours", "timm", "hugging-face-dinov2"])
def test_checkpointing_and_inference_mode_change_no_map(name: str) -> None:
    model, images = build(name)
    methods = ["rollout", "gae", "libra-fullgrad"]
    _, _, expected = compute_maps(model, images, methods=methods)
    if hasattr(model, "set_grad_checkpointing"):
        model.set_grad_checkpointing()
    with torch.inference_mode():
        _, _, found = compute_maps(model, images.clone(), methods=methods)
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
