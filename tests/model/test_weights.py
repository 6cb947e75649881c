"""Files of weights: what is read, what is refused, and what the refusal says."""

import argparse
import os

import pytest
import torch
from safetensors.torch import save_file

import vit
from vit.model.modules import load_pretrained, load_timm
from vit.model.vision_transformer import VisionTransformer
from vit.model.weights import check_fit, infer_architecture, read_weights


def build(**changes):
    return VisionTransformer(**({"img_size": 64, "depth": 2} | changes))


def test_weights_alone_need_their_module_once(tmp_path):
    """They don't tell their number of heads, and another number gives other logits."""
    model = build(img_size=32, num_classes=5, embed_dim=96, num_heads=3).eval()
    torch.save(model.state_dict(), tmp_path / "weights.pth")
    for load in (vit.load_bundle, lambda path: load_pretrained(path, num_classes=5)):
        with pytest.raises(
            ValueError, match=r"weights.pth has weights alone.*load_bundle\(path, mod"
        ):
            load(tmp_path / "weights.pth")
    fresh = VisionTransformer(**model.architecture)
    vit.load_bundle(tmp_path / "weights.pth", model=fresh).save(tmp_path / "model.safetensors")
    images = torch.randn(2, 3, 32, 32)
    assert torch.equal(load_timm(tmp_path / "model.safetensors")(images), model(images))


class TestRefusal:
    def test_another_architecture_lists_differences(self):
        weights = build(embed_dim=384, num_heads=6, depth=12).state_dict()
        with pytest.raises(
            ValueError, match=r"small.pth does not fit this model in \d+ tensors"
        ) as error:
            check_fit(build(), weights, origin="small.pth")
        message = str(error.value)
        assert "cls_token is [1, 1, 384] there and [1, 1, 192] in the model" in message

    @pytest.mark.parametrize("value", [float("nan"), float("inf")])
    def test_non_finite_weights_name_the_tensor(self, tmp_path, value):
        state = build().state_dict()
        state["blocks.1.mlp.fc1.bias"][3:5] = value
        save_file(state, tmp_path / "bad.safetensors")
        with pytest.raises(
            ValueError,
            match=r"bad.safetensors: blocks.1.mlp.fc1.bias holds 2 NaN or infinite values",
        ):
            read_weights(tmp_path / "bad.safetensors")

    def test_another_kind_of_network_names_what_it_holds(self):
        with pytest.raises(
            ValueError, match=r"it is not a plain vision transformer .* but holds conv1.weight"
        ):
            infer_architecture({"conv1.weight": torch.zeros(1)}, origin="it")


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("half.safetensors", "is not a complete model file"),
            ("half.pth", "is damaged"),
        ],
    )
    def test_half_a_file(self, tmp_path, name, message):
        path = tmp_path / name
        if name.endswith("pth"):
            torch.save(build().state_dict(), path)
        else:
            save_file(build().state_dict(), path)
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
        with pytest.raises(ValueError, match=f"{name} {message}"):
            read_weights(path)

    def test_a_torch_file_that_would_run_code_is_refused(self, tmp_path):
        class Malicious:
            def __reduce__(self):
                return os.system, (f"touch {tmp_path / 'executed'}",)

        torch.save({"state_dict": build().state_dict(), "x": Malicious()}, tmp_path / "code.pth")
        with pytest.raises(
            ValueError, match="holds more than tensors and plain values; save model"
        ):
            read_weights(tmp_path / "code.pth")
        assert not (tmp_path / "executed").exists()

    @pytest.mark.parametrize(
        "wrap",
        [
            lambda state: {f"module.{name}": value for name, value in state.items()},
            lambda state: {f"_orig_mod.{name}": value for name, value in state.items()},
            lambda state: {
                "state_dict": {f"model.{name}": value for name, value in state.items()}
                | {"criterion.weight": torch.ones(3)}
            },
            lambda state: {
                "teacher": {f"backbone.{name}": value for name, value in state.items()},
                "student": {},
            },
            lambda state: {"model": state, "args": argparse.Namespace(epochs=3), "epoch": 3},
        ],
        ids=["DataParallel", "torch.compile", "Lightning", "DINO", "script"],
    )
    def test_what_trainers_put_around_the_weights_goes(self, tmp_path, wrap):
        state = build().state_dict()
        torch.save(wrap(state), tmp_path / "weights.pth")
        fresh = build()
        weights = vit.load_bundle(tmp_path / "weights.pth", model=fresh).model.state_dict()
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[name], value) for name, value in state.items())
