"""The model: geometry, capture, initialisation, and what each option promises."""

import copy
import json
import math

import pytest
import torch
from torch import nn

from vit.model.patch_embed import PatchEmbed, build_sincos_positions
from vit.model.stem import STEMS, build_stem
from vit.model.vision_transformer import VisionTransformer

OPTIONS = [
    {},
    {"global_pool": "avg"},
    {"global_pool": "avg", "class_token": True, "fc_norm": False},
    {"stem": "conv", "pos_embed": "sincos"},
    {"stem": "conv_pool", "mlp": "relu2"},
    {"stem": "conv_pool_residual", "global_pool": "avg"},
    {"stem": "conv_residual", "global_pool": "avg"},
    {
        "mlp": "relu2",
        "qk_norm": True,
        "init_values": 1e-5,
        "reg_tokens": 4,
        "no_embed_class": True,
    },
    {"qkv_bias": False},
]


def tiny(**options: object) -> VisionTransformer:
    settings = {
        "img_size": (8, 16),
        "patch_size": 4,
        "num_classes": 5,
        "embed_dim": 32,
        "depth": 3,
        "num_heads": 4,
    }
    return VisionTransformer(**(settings | options))


@pytest.mark.parametrize("options", OPTIONS)
def test_forward_and_its_attention_agree(options):
    torch.manual_seed(0)
    model, images = tiny(**options).eval(), torch.randn(2, 3, 8, 16)
    logits, attentions = model.forward_with_attention(images)
    torch.testing.assert_close(model(images), logits, atol=1e-5, rtol=0)
    tokens = model.num_prefix_tokens + 2 * 4
    assert [tuple(weights.shape) for weights in attentions] == [(2, 4, tokens, tokens)] * 3
    torch.testing.assert_close(attentions[1].sum(-1), torch.ones(2, 4, tokens))


@pytest.mark.parametrize("options", OPTIONS)
def test_architecture_rebuilds_the_model(options):
    model = tiny(**options)
    rebuilt = VisionTransformer(**json.loads(json.dumps(model.architecture)))
    rebuilt.load_state_dict(model.state_dict(), strict=True)
    assert rebuilt.architecture == model.architecture


@pytest.mark.parametrize(("pool", "pos_embed"), [("token", "learned"), ("avg", "sincos")])
def test_training_takes_images_of_other_sizes_and_trains_the_positions(
    pool: str, pos_embed: str
) -> None:
    torch.manual_seed(0)
    model = VisionTransformer(
        16, 4, 3, 5, 16, depth=2, num_heads=2, global_pool=pool, pos_embed=pos_embed
    )
    small = torch.randn(2, 3, 8, 12)
    logits = model(small)
    logits.sum().backward()
    if pos_embed == "learned":
        assert model.pos_embed.grad.abs().sum() > 0
        expected = copy.deepcopy(model)
        expected.set_input_size((8, 12))
        torch.testing.assert_close(logits, expected(small))
    for images in (torch.randn(2, 3, 8, 13), torch.randn(2, 1, 8, 12)):
        with pytest.raises(ValueError, match="set_input_size"):
            model(images)
    with pytest.raises(ValueError, match="set_input_size"):
        model.eval()(small)


class TestGeometry:
    @pytest.mark.parametrize(
        ("changes", "message"),
        [
            ({"img_size": 30}, r"not a multiple of patch_size \(4, 4\); try \(32, 32\)"),
            (
                {"img_size": (8, 8, 8)},
                r"img_size \(8, 8, 8\) is neither a number from 1 to 16,384 nor two",
            ),
            ({"patch_size": 0}, "patch_size 0 is neither a number from 1"),
            ({"num_heads": 5}, "num_heads 5 does not divide embed_dim 32"),
            (
                {"global_pool": "mean"},
                "unknown global_pool 'mean'; known: avg, token",
            ),
            (
                {"stem": "resnet"},
                "unknown stem 'resnet'; known: conv, conv_pool, conv_pool_residual, conv_residual, patch",
            ),
            ({"mlp": "tanh"}, "unknown mlp 'tanh'; known: gelu, relu2"),
            ({"pos_embed": "rope"}, "unknown pos_embed 'rope'; known: learned, sincos"),
            (
                {"stem": "conv", "patch_size": (3, 4), "img_size": 12},
                "needs a power of two, such as 4",
            ),
            ({"class_token": False}, "global_pool='token' reads the class token"),
            (
                {"embed_dim": 30, "num_heads": 3, "pos_embed": "sincos"},
                "embed_dim that 4 divides, not 30",
            ),
            ({"attention_backend": "flash"}, "backend 'flash'; known: auto, explicit, fused"),
        ],
    )
    def test_impossible_models_are_refused_with_the_value_and_the_cure(self, changes, message):
        with pytest.raises(ValueError, match=message):
            tiny(**changes)

    @pytest.mark.parametrize("stem", STEMS)
    def test_tokens_go_row_by_row_and_see_their_own_patch(self, stem):
        torch.manual_seed(0)
        embed = PatchEmbed((16, 24), 4, in_chans=3, embed_dim=16, stem=stem)
        images = torch.randn(1, 3, 16, 24, requires_grad=True)
        for row, column in ((0, 0), (1, 4), (3, 5)):
            (gradient,) = torch.autograd.grad(
                embed(images)[0, row * 6 + column].square().sum(), images
            )
            seen = (
                gradient[0].abs().sum(0).reshape(4, 4, 6, 4).sum((1, 3))
            )  # by patch, [rows, columns]
            assert seen[row, column] > 0
            reaches = {"patch": 0, "conv": 1, "conv_pool": 2, "conv_pool_residual": 3}
            reach = reaches.get(stem, 5)
            far = [
                abs(r - row) > reach or abs(c - column) > reach for r in range(4) for c in range(6)
            ]
            assert seen.flatten()[torch.tensor(far)].sum() == 0

    @torch.no_grad()
    def test_patchify_is_the_convolution_of_its_weights(self):
        embed = PatchEmbed((8, 6), (4, 2), in_chans=3, embed_dim=5).double()
        images = torch.randn(2, 3, 8, 6, dtype=torch.float64)
        expected = embed.proj(images).flatten(2).transpose(1, 2)
        torch.testing.assert_close(embed(images), expected, atol=1e-14, rtol=0)

    @pytest.mark.parametrize(
        ("stem", "widths"), [("conv", (16, 32, 64)), ("conv_pool", (16, 16, 64))]
    )
    def test_stems_have_the_widths_of_their_description(self, stem, widths):
        layers, _ = build_stem(stem, 3, 64, patch_side=8)
        assert tuple(m.out_channels for m in layers if isinstance(m, nn.Conv2d)) == widths


class TestPositions:
    def test_sincos_by_hand(self):
        positions = build_sincos_positions((2, 3), 8).double()
        low = 1 / 10_000  # the lower of two frequencies
        x, y = 2, 1  # the last token: third column, second row
        expected = [math.sin(x), math.sin(x * low), math.cos(x), math.cos(x * low)]
        expected += [math.sin(y), math.sin(y * low), math.cos(y), math.cos(y * low)]
        torch.testing.assert_close(
            positions[0, 5], torch.tensor(expected, dtype=torch.float64), atol=1e-7, rtol=0
        )

    def test_sincos_is_fixed_and_made_anew_for_another_size(self):
        model = tiny(pos_embed="sincos", global_pool="avg")
        assert "pos_embed" not in model.state_dict()
        assert "pos_embed" not in dict(model.named_parameters())
        model.set_input_size((16, 20))
        assert torch.equal(model.pos_embed, build_sincos_positions((4, 5), 32))


class TestInitialisation:
    @pytest.fixture
    def model(self) -> VisionTransformer:
        torch.manual_seed(0)
        return VisionTransformer(
            32, 4, num_classes=100, init_values=0.1, reg_tokens=4, qk_norm=True
        )

    @torch.no_grad()
    def test_linear_maps_are_truncated_normal(self, model):
        for name, part in model.named_modules():
            if isinstance(part, nn.Linear):
                assert part.weight.std() == pytest.approx(0.02, rel=0.03), name
                assert abs(part.weight.mean()) < 0.0005, name
                assert not part.bias.any(), name

    @torch.no_grad()
    def test_embeddings(self, model):
        assert model.pos_embed.std() == pytest.approx(0.02, rel=0.05)
        assert model.cls_token.std() == pytest.approx(1e-6, rel=0.2)
        assert model.reg_token.std() == pytest.approx(1e-6, rel=0.2)
        # LeCun: pixels of unit variance make tokens of unit variance
        assert model.patch_embed(torch.randn(8, 3, 32, 32)).var() == pytest.approx(1, rel=0.05)


class TestTraining:
    @pytest.mark.parametrize("options", OPTIONS)
    def test_bfloat16_autocast_is_close_and_trains(self, options, randomise):
        model, images = randomise(tiny(**options)).train(), torch.randn(4, 3, 8, 16)
        with torch.autocast("cpu", torch.bfloat16):
            logits = model(images)
        assert logits.dtype == torch.bfloat16
        exact = model(images)
        assert (logits - exact).abs().max() < 0.03 * exact.abs().max()
        logits.float().square().sum().backward()
        assert all(bool(parameter.grad.isfinite().all()) for parameter in model.parameters())

    @pytest.mark.parametrize("autocast", [False, True])
    def test_checkpointing_changes_no_number(self, autocast):
        torch.manual_seed(0)
        model, images, results = tiny(drop_path_rate=0.5), torch.randn(4, 3, 8, 16), []
        for model.grad_checkpointing in (False, True):
            model.zero_grad()
            torch.manual_seed(1)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(images).float().square().sum()
            loss.backward()
            results.append(
                [loss.detach(), *(parameter.grad.clone() for parameter in model.parameters())]
            )
        assert all(
            torch.equal(plain, checkpointed) for plain, checkpointed in zip(*results, strict=True)
        )

    @pytest.mark.parametrize(("rate", "kept"), [(0.5, 4), (0.9, 1), (0.99, 1), (0.0, 8)])
    def test_patches_are_dropped_in_training_only_and_their_number_is_exact(
        self, rate: float, kept: int
    ) -> None:
        torch.manual_seed(0)
        model, images, seen = tiny(reg_tokens=2), torch.randn(6, 3, 8, 16), []
        whole = model._embed(images)  # class token, two registers, eight patches
        model.patch_drop_rate = rate
        model.blocks[0].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
        for training in (False, True):
            model.train(training)(images)
        assert torch.equal(seen[0], whole)
        assert torch.equal(seen[1][:, :3], whole[:, :3])
        same = (seen[1][:, 3:, None] == whole[:, None, 3:]).all(dim=-1)  # [images, kept, patches]
        assert same.shape[1] == kept
        assert (same.sum(dim=2) == 1).all()  # every token that is kept is a patch,
        assert (same.sum(dim=1) <= 1).all()  # each a different one,
        assert (
            len({tuple(of_image) for of_image in same.any(dim=1).tolist()}) > 1 or kept == 8
        )  # by image

    def test_freezing_n_blocks_freezes_the_embedding_too(self):
        model = tiny(stem="conv", reg_tokens=1)
        model.freeze(2)
        trained = {
            ".".join(name.split(".")[:2])
            for name, value in model.named_parameters()
            if value.requires_grad
        }
        assert {name for name in trained if name.startswith("blocks")} == {"blocks.2"}
        assert {name.split(".")[0] for name in trained} == {"blocks", "norm", "head"}
        with pytest.raises(ValueError, match="freeze 4: the model has 3 blocks"):
            model.freeze(4)

    @pytest.mark.parametrize("checkpointing", [False, True])
    def test_leaving_out_unread_tokens_changes_neither_logits_nor_gradients(self, checkpointing):
        """In training the last block computes only the token that the head reads."""
        torch.manual_seed(0)
        model = tiny(reg_tokens=2, init_values=0.1, qk_norm=True).double().train()
        model.grad_checkpointing = checkpointing
        shapes = []
        model.blocks[-1].register_forward_hook(
            lambda module, arguments, output: shapes.append(output.shape)
        )
        parameters = list(model.parameters())
        for parameter in parameters:
            nn.init.normal_(parameter, std=0.2)
        images = torch.randn(4, 3, 8, 16, dtype=torch.float64)
        logits = model(images)
        all_tokens = model.forward_head(model.forward_features(images))
        torch.testing.assert_close(logits, all_tokens, rtol=1e-12, atol=1e-12)
        gradients = torch.autograd.grad(logits.square().sum(), parameters)
        expected = torch.autograd.grad(all_tokens.square().sum(), parameters)
        torch.testing.assert_close(gradients, expected, rtol=1e-11, atol=1e-12)
        model.eval()(images)
        assert [shapes[0], shapes[-1]] == [(4, 1, 32), (4, 11, 32)]


def test_the_rate_of_dropped_paths_rises_from_0_at_the_first_block():
    rates = [block.drop_path1.rate for block in tiny(depth=5, drop_path_rate=0.4).blocks]
    assert rates == pytest.approx([0, 0.1, 0.2, 0.3, 0.4])
