"""What was found about a module is looked at again when it changes; images refuse none for ever."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import timm
import torch
import torchvision
from torch import Tensor, nn

import vit
from tests.explanation.capture.hand_written import Classifier, blocks, build, own, tensor_softmax


def make_torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(32, 8, 2, 2, 16, 32, num_classes=3).eval()


def test_a_head_of_zeros_is_refused_before_training_and_read_after_it() -> None:
    model, images = make_torchvision(), torch.randn(2, 3, 32, 32)
    with pytest.raises(ValueError, match="a head of zeros"):
        vit.attribute(model, images)
    nn.init.normal_(model.heads.head.weight)
    assert vit.attribute(model, images).shape == (2, 4, 4)


def test_a_batch_of_nan_says_so_and_the_next_one_is_read() -> None:
    model, images = make_torchvision(), torch.randn(2, 3, 32, 32)
    nn.init.normal_(model.heads.head.weight)
    broken = images.clone()
    broken[1, 0, 0, 0] = torch.nan
    with pytest.raises(ValueError, match="of finite floating-point values"):
        vit.attribute(model, broken)
    assert vit.attribute(model, images).isfinite().all()


def test_threads_that_share_a_module_get_its_maps_and_leave_it_as_it_was() -> None:
    model, images = make_torchvision(), torch.randn(2, 3, 32, 32)
    nn.init.normal_(model.heads.head.weight)
    expected = vit.attribute(model, images)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(vit.attribute, [model] * 8, [images] * 8))
    assert all(torch.equal(maps, expected) for maps in found)
    assert all(parameter.requires_grad for parameter in model.parameters())
    assert not model.training
    assert torch.backends.mha.get_fastpath_enabled()


class Side(nn.Module):
    """A block whose convolution over the tokens starts at 0, as ControlNet's does."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.mix = block, nn.Conv1d(24, 24, 3, padding=1)
        nn.init.zeros_(self.mix.weight)
        nn.init.zeros_(self.mix.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x) + self.mix(x.mT).mT


def test_a_module_that_training_changed_is_checked_again() -> None:
    model, images = build(
        lambda: Classifier(nn.Sequential(*map(Side, blocks(own("chunk", tensor_softmax)))))
    )
    for block in model.encoder:
        nn.init.zeros_(block.mix.weight)
    assert vit.attribute(model, images, method="rollout").shape == (2, 4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(images).square().sum().backward()
    optimizer.step()
    with pytest.raises(ValueError, match="mixes tokens elsewhere"):
        vit.attribute(model, images, method="rollout")


def test_images_by_keyword_tell_their_size() -> None:
    model, images = build(lambda: Classifier(blocks(own("chunk", tensor_softmax))))
    with torch.no_grad(), vit.capture_attention(model) as record:
        model(images=images)
    by_keyword = record.attentions
    with torch.no_grad(), vit.capture_attention(model) as record:
        model(images)
    assert all(map(torch.equal, by_keyword, record.attentions))


def make_timm(**options: object) -> nn.Module:
    torch.manual_seed(0)
    return timm.create_model(
        "vit_tiny_patch16_224",
        img_size=32,
        patch_size=8,
        embed_dim=48,
        depth=2,
        num_classes=5,
        **options,
    ).eval()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("create", [make_timm, make_torchvision])
def test_weights_in_half_precision_are_read(
    create: Callable[[], nn.Module], dtype: torch.dtype
) -> None:
    model, images = create(), torch.randn(2, 3, 32, 32)
    for parameter in model.parameters():
        parameter.data += 0.1 * torch.randn(parameter.shape)
    for method in ("rollout", "gae", "libra-removal"):
        expected = vit.attribute(model.float(), images, method=method, target=[1, 2])
        found = vit.attribute(model.to(dtype), images, method=method, target=[1, 2])
        assert found.dtype == torch.float32
        scale = expected.abs().max()
        assert (found - expected).abs().max() < (0.05 if method == "rollout" else 0.3) * scale


@pytest.mark.parametrize("part", ["block", "attention", "forward"])
def test_compiled_parts_run_as_they_are_written(part: str) -> None:
    model, images = make_timm(), torch.randn(2, 3, 32, 32)
    expected = vit.attribute(model, images, target=[1, 2])
    for number, block in enumerate(model.blocks):
        if part == "block":
            model.blocks[number] = torch.compile(block, backend="eager")
        elif part == "attention":
            block.attn.compile(backend="eager")
        else:
            block.attn.forward = torch.compile(block.attn.forward, backend="eager")
    assert torch.allclose(vit.attribute(model, images, target=[1, 2]), expected, atol=1e-6)


def test_maps_that_are_the_same_for_every_class_need_no_classes() -> None:
    model, images = make_timm(global_pool="token"), torch.randn(2, 3, 32, 32)
    expected = vit.attribute(model, images, method="rollout")
    model.reset_classifier(0)
    assert torch.equal(vit.attribute(model, images, method="rollout"), expected)
