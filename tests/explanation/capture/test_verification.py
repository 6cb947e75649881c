"""Models whose map would be plausible and wrong are refused, with what was seen."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import timm
import torch
import transformers
from PIL import Image
from torch import Tensor, nn

import vit
from tests.explanation.model_zoo import build, build_ours, build_timm, prepare
from vit.bundle import Bundle
from vit.explanation.capture.forward import capture_attention, run_forward
from vit.explanation.capture.reader import read_model
from vit.explanation.explainer import Explainer
from vit.explanation.items import find_items
from vit.explanation.methods.maps import compute_maps


class Wrapper(nn.Module):
    """A model whose forward pass is `compute` of the inner models."""

    def __init__(self, compute: Callable[..., Tensor], *models: nn.Module) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.compute = compute

    def forward(self, images: Tensor) -> Tensor:
        return self.compute(images, *self.models)


class MyAttention(nn.Module):
    def __init__(self, width: int = 24) -> None:
        super().__init__()
        self.to_qkv = nn.Linear(width, 3 * width)

    def forward(self, tokens: Tensor, **options: object) -> Tensor:
        query, key, value = self.to_qkv(tokens).chunk(3, dim=-1)
        return (query @ key.transpose(-2, -1) / 5).softmax(dim=-1) @ value


class Convolve(nn.Module):
    """Each token takes from its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(24, 24, 3, padding=1)

    def forward(self, tokens: Tensor) -> Tensor:
        return tokens + self.convolution(tokens.mT).mT


def change_block(index: int, change: Callable[[Any], object]) -> nn.Module:
    model = build_timm()
    change(model.blocks[index])
    return model


def set_module(name: str, module: nn.Module) -> nn.Module:
    model = build_timm()
    setattr(model, name, module)
    return model


def insert(module: nn.Module) -> nn.Module:
    """Between two blocks."""
    model = build_timm()
    model.blocks.insert(1, module)
    return model


def crop(images: Tensor, model: Any) -> Tensor:
    inner = images[..., 16:-16, 16:-16]
    return model(nn.functional.interpolate(inner, images.shape[-2:]))


def share_a_layer() -> nn.Module:
    model = build_timm()
    model.blocks[2].attn = model.blocks[0].attn
    return model


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "convolution": (lambda: insert(Convolve()), "mixes tokens elsewhere"),
    "mixed before": (
        lambda: nn.Sequential(set_module("norm_pre", Convolve())),
        "mixed before the first attention layer",
    ),
    "mixed after": (
        lambda: nn.Sequential(set_module("norm", Convolve())),
        "mixes tokens elsewhere",
    ),
    "shared layer": (share_a_layer, r"runs 2 times in one forward pass"),
    "crop": (lambda: Wrapper(crop, build_timm()), "no token of Wrapper changes|doesn't have"),
    "an image that is not looked at": (
        lambda: Wrapper(lambda x, m: m(torch.ones_like(x)), build_timm()),
        "no gradient leads from the logits of Wrapper to the pixels",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_wrong_map_is_refused_with_what_was_seen(name: str) -> None:
    create, message = REFUSED[name]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model, images = prepare(create(), (64, 96))
    with pytest.raises(ValueError, match=message):
        compute_maps(model, images, methods=["rollout", "gae"])


def test_a_padded_image_is_refused_and_a_whole_one_read() -> None:
    settings = {"dynamic_img_size": True, "dynamic_img_pad": True}
    model, images = prepare(build_timm(**settings), (96, 96))
    assert run_forward(model, images).grid == (6, 6)
    for wrapped in (model, nn.Sequential(nn.Identity(), model)):
        with pytest.raises(ValueError, match=r"pads or crops images of 90×90 pixels .* 16×16"):
            run_forward(wrapped, images[..., :90, :90])


def test_a_rest_that_no_patch_covers_is_refused() -> None:
    model, _ = build("hugging-face-dinov2")
    with pytest.raises(ValueError, match="pads or crops images of 90×90 pixels"):
        run_forward(model, torch.randn(1, 3, 90, 90))


def test_a_white_image_whose_values_are_clipped_is_read() -> None:
    model = Wrapper(lambda images, inner: inner(images.clamp(0, 1)), build_timm())
    model, images = prepare(model, (64, 96))
    assert run_forward(model, torch.ones_like(images)).grid == (4, 6)


def test_several_passes_within_a_capture_are_no_error() -> None:
    """The record has the last pass, also where it didn't go through the model's own call."""
    model, images = prepare(build_ours(), (32, 48))
    with torch.no_grad(), capture_attention(model) as record:
        model(images)
        expected = record.attentions
        model.forward_features(images.flip(-1))
        assert not torch.allclose(record.attentions[0], expected[0], atol=1e-4)
        model.forward_features(images)
    assert all(map(torch.equal, record.attentions, expected))


def test_a_hybrid_with_global_norms_is_read() -> None:
    model = timm.create_model("vit_tiny_r_s16_p8_224", depth=2, img_size=64, num_classes=3)
    model, images = prepare(model, (64, 64))
    assert run_forward(model, images).grid == (2, 2)


def test_a_layer_that_never_runs_is_left_out() -> None:
    model, images = prepare(build_timm(), (64, 96))
    expected = vit.attribute(model, images, method="rollout")
    model.spare = copy.deepcopy(model.blocks[0])
    assert torch.equal(vit.attribute(model, images, method="rollout"), expected)


@pytest.mark.parametrize("number", [0, 1])
def test_an_attention_of_ones_own_in_a_known_model_is_read(number: int) -> None:
    model = change_block(number, lambda block: setattr(block, "attn", MyAttention()))
    model, images = prepare(model, (64, 96))
    with torch.no_grad(), vit.capture_attention(model) as record:
        model(images)
    assert [attention.shape[1] for attention in record.attentions].count(1) == 1
    rollout = torch.eye(25)[:1].expand(2, 1, -1)
    for attention in reversed(record.attentions):
        rollout = (rollout + rollout @ attention.mean(dim=1)) / 2
    found = vit.attribute(model, images, method="rollout").flatten(1)
    assert (found - rollout[:, 0, 1:]).abs().max() < 1e-6


def explain_photo(model: nn.Module) -> None:
    count = {"class_names": [str(label) for label in range(model.head.out_features)]}
    bundle = Bundle.from_model(model.eval(), **count)
    items = find_items(bundle, [Image.new("RGB", (96, 64))], 1)
    list(Explainer(bundle, ["rollout"]).explain(items))


def test_logits_that_are_not_finite_are_refused() -> None:
    model = build_timm()
    explain_photo(model)
    model.head.bias.data[1] = torch.nan
    with pytest.raises(ValueError, match="logits that are not finite"):
        explain_photo(model)


@pytest.mark.parametrize("seed", range(5))
def test_a_convolutional_stem_is_read(seed: int) -> None:
    torch.manual_seed(seed)
    model = build_ours(img_size=64, patch_size=8, stem="conv", global_pool="avg").eval()
    assert run_forward(model, torch.randn(1, 3, 64, 64)).grid == (8, 8)


class _FewTokens(nn.Module):
    """A Hugging Face model that attends between a few of its patches."""

    def __init__(self) -> None:
        super().__init__()
        sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        config = transformers.ViTMAEConfig(image_size=64, intermediate_size=8, **sizes)
        self.backbone, self.head = transformers.ViTMAEModel(config), nn.Linear(8, 3)

    def forward(self, images: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same masks in each pass
        return self.head(self.backbone(images).last_hidden_state.mean(dim=1))


def test_a_grid_of_two_by_two_tokens_is_no_map_of_more_patches() -> None:
    torch.manual_seed(0)
    with pytest.raises(ValueError, match="4×4 patches and attends between 5 tokens"):
        run_forward(_FewTokens().eval(), torch.randn(1, 3, 64, 64))


# --- what is kept for a module that is passed again


def count_passes(module: nn.Module, images: Tensor) -> int:
    """Number of images that pass through the model while its maps are computed."""
    counted = []
    handle = next(module.children()).register_forward_hook(lambda *_: counted.append(1))
    compute_maps(module, images)  # the hook is new: it is settled anew
    counted.clear()
    compute_maps(module, images)
    handle.remove()
    return len(counted)


def test_a_module_that_is_passed_again_is_not_searched_again_until_it_changes() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2).eval()
    images = torch.randn(2, 3, 32, 32)
    first = compute_maps(model, images)[2][0].values
    assert count_passes(model, images) == 1
    assert torch.equal(compute_maps(model, images)[2][0].values, first)
    # in training, weights change and the maps with them
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.mul_(-3)
    changed = compute_maps(model, images)[2][0].values
    fresh = copy.deepcopy(model)
    assert torch.equal(changed, compute_maps(fresh, images)[2][0].values)
    assert not torch.allclose(changed, first, rtol=1e-2)

    # each change is noticed: another attention, a setting, a method, a hook
    attention = model.blocks[0].attn
    rolled = type("Rolled", (type(attention),), {})
    rolled.forward = lambda self, x, **options: super(rolled, self).forward(x, **options).roll(1, 1)
    for change, undo in (
        (
            lambda: setattr(attention, "__class__", rolled),
            lambda: setattr(attention, "__class__", rolled.__base__),
        ),
        (lambda: setattr(attention, "scale", 1.0), lambda: setattr(attention, "scale", 64**-0.5)),
        (
            lambda: setattr(attention, "forward", lambda x, **_: 2 * x),
            lambda: attention.__dict__.pop("forward"),
        ),
    ):
        assert read_model(model, images).recall(images)
        change()
        assert not read_model(model, images).recall(images)
        undo()
        assert read_model(model, images).recall(images)
    assert not read_model(model, images).recall(images[:, :, :16])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not read_model(model, images).recall(images)
    handle = attention.register_forward_hook(lambda *_: _[2].roll(1, 1))
    with pytest.raises(ValueError, match="rollout needs the model's attention"):
        compute_maps(model, images)
    handle.remove()
    assert torch.equal(compute_maps(model, images)[2][0].values, changed)


def test_what_is_kept_neither_keeps_a_module_alive_nor_is_pickled_with_it() -> None:
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=1).eval()
    images = torch.randn(1, 3, 32, 32)
    size = len(pickle.dumps(model))
    compute_maps(model, images)
    vit.attribute(model, images, target=3)
    assert len(pickle.dumps(model)) == size
    assert not [name for name in vars(model) if "vit" in name]
    gone = weakref.ref(model)
    with ThreadPoolExecutor(4) as pool:
        readers = list(pool.map(read_model, [model] * 64, [images] * 64))
    assert all(reader.recall(images) for reader in readers)
    del model, readers
    gc.collect()
    assert gone() is None
