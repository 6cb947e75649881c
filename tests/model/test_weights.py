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

# the number of heads is taken with a warning
pytestmark = pytest.mark.filterwarnings("ignore:.*attention heads share")


def build(**changes):
    return VisionTransformer(**({"img_size": 64, "depth": 2} | changes))


class TestHeads:
    """A file of weights doesn't tell its number of heads, and another number gives other logits."""

    def save(self, tmp_path, **changes):
        model = build(img_size=32, num_classes=5, depth=1, **changes).eval()
        path = tmp_path / "weights.pth"
        torch.save(model.state_dict(), path)
        return model, path

    def test_a_width_of_no_published_vit_needs_its_module(self, tmp_path):
        model, path = self.save(tmp_path, embed_dim=96, num_heads=3)
        for load in (load_timm, lambda path: load_pretrained(path, num_classes=5)):
            with pytest.raises(
                ValueError, match=r"weights.pth .*96 channels.*load_bundle\(path, mod"
            ):
                load(path)
        fresh = VisionTransformer(**model.architecture)
        vit.load_bundle(path, model=fresh).save(tmp_path / "model.safetensors")
        images = torch.randn(2, 3, 32, 32)
        assert torch.equal(load_timm(tmp_path / "model.safetensors")(images), model(images))

    def test_published_widths_have_the_published_number_and_it_is_said(self, tmp_path):
        _, path = self.save(tmp_path, embed_dim=512, num_heads=8)
        with pytest.warns(UserWarning, match="512 channels; 8 are taken"):
            loaded = load_timm(path)
        assert loaded.architecture["num_heads"] == 8


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

    def test_a_grid_that_is_not_square_is_not_guessed(self, tmp_path):
        torch.save(build(img_size=(32, 48)).state_dict(), tmp_path / "weights.pth")
        with pytest.raises(ValueError, match=r"pos_embed is \[1, 7, 192\] there"):
            load_timm(tmp_path / "weights.pth")

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
            lambda state: {
                f"{network}.{name}": value * (network == "model")
                for network in ("model_ema", "model")
                for name, value in state.items()
            },
            lambda state: {"model": state, "args": argparse.Namespace(epochs=3), "epoch": 3},
        ],
        ids=["DataParallel", "torch.compile", "Lightning", "DINO", "average", "script"],
    )
    def test_what_trainers_put_around_the_weights_goes(self, tmp_path, wrap):
        state = build().state_dict()
        torch.save(wrap(state), tmp_path / "weights.pth")
        weights = load_timm(tmp_path / "weights.pth").state_dict()
        assert weights.keys() == state.keys()
        assert all(torch.equal(weights[name], value) for name, value in state.items())
