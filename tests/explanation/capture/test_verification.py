"""Models whose map would be plausible and wrong are refused, with what was seen."""

import copy
import gc
import pickle
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
from torch import nn

import vit
from tests.explanation.model_zoo import build_hugging_face, build_ours, build_timm, prepare
from vit.explanation.capture.forward import capture_attention, run_forward
from vit.explanation.capture.reader import read_model
from vit.explanation.methods.maps import compute_maps

OTHERS: dict[str, tuple[Callable[[], nn.Module], int, str]] = {
    "PiT": (lambda: timm.create_model("pit_ti_224"), 224, "no place in a map|something else"),
    "CrossViT": (
        lambda: timm.create_model("crossvit_tiny_240", depth=((1, 1, 0),)),
        240,
        "are there branches",
    ),
    "two attentions in a block": (
        lambda: timm.create_model("vit_dlittle_patch16_reg1_gap_256", depth=1),
        256,
        "two attentions in one block",
    ),
    "no head": (
        lambda: build_hugging_face(model="Model"),
        64,
        "doesn't return logits",
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_others_are_refused_in_a_sentence(name: str) -> None:
    create, size, message = OTHERS[name]
    torch.manual_seed(0)
    with pytest.raises(ValueError, match=message):
        compute_maps(create().eval(), torch.randn(1, 3, size, size), methods=["rollout"])


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


@pytest.mark.parametrize("seed", range(2))
def test_a_convolutional_stem_is_read(seed: int) -> None:
    torch.manual_seed(seed)
    model = build_ours(img_size=64, patch_size=8, stem="conv", global_pool="avg").eval()
    assert run_forward(model, torch.randn(1, 3, 64, 64)).grid == (8, 8)


# --- what is kept for a module that is passed again


def test_a_module_that_is_passed_again_is_not_searched_again_until_it_changes() -> None:
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, depth=2).eval()
    images = torch.randn(2, 3, 32, 32)
    first = compute_maps(model, images)[2][0]
    assert read_model(model, images).is_checked
    assert torch.equal(compute_maps(model, images)[2][0], first)
    # in training, weights change and the maps with them
    with torch.no_grad():
        model.blocks[1].attn.qkv.weight.mul_(-3)
    changed = compute_maps(model, images)[2][0]
    fresh = copy.deepcopy(model)
    assert torch.equal(changed, compute_maps(fresh, images)[2][0])
    assert not torch.allclose(changed, first, rtol=1e-2)

    # each change is noticed: a setting, a method, a hook
    attention = model.blocks[0].attn
    for change, undo in (
        (lambda: setattr(attention, "scale", 1.0), lambda: setattr(attention, "scale", 64**-0.5)),
        (
            lambda: setattr(attention, "forward", lambda x, **_: 2 * x),
            lambda: delattr(attention, "forward"),
        ),
    ):
        assert read_model(model, images).is_checked
        change()
        assert not read_model(model, images).is_checked
        undo()
    assert not read_model(model, images[:, :, :16]).is_checked
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not read_model(model, images).is_checked
    handle = attention.register_forward_hook(lambda *_: _[2].roll(1, 1))
    with pytest.raises(ValueError, match="mixes tokens elsewhere"):
        compute_maps(model, images)
    handle.remove()
    assert torch.equal(compute_maps(model, images)[2][0], changed)


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
    assert all(reader.is_checked for reader in readers)
    del model, readers
    gc.collect()
    assert gone() is None
