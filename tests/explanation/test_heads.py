"""The effect of a head is the derivative of its gate, and ranks heads as ablating them does."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from scipy.stats import spearmanr
from torch import Tensor, nn

from tests.conftest import BuildOnce
from tests.explanation import planted_evidence
from tests.explanation.model_zoo import build_timm, prepare
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.capture.forward import run_forward
from vit.explanation.heads import HeadEffects, compute_head_effects, measure_heads
from vit.model.logits import compute_logits

STEP = 1e-4


def gate(layer: Any, head: int, value: float) -> Callable[[], None]:
    """Multiply what a head of a captured layer writes; returns what takes it back."""

    def multiply(module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        heads = args[0].unflatten(-1, (layer.num_heads, -1)).clone()
        heads[:, :, head] *= value
        return (heads.flatten(2),)

    return layer.module.proj.register_forward_pre_hook(multiply).remove


def measure_scores(model: nn.Module, images: Tensor, classes: Tensor) -> Tensor:
    with torch.no_grad():
        return compute_logits(model, images).gather(1, classes[:, None])[:, 0]


def test_an_effect_is_the_derivative_of_the_heads_gate() -> None:
    model, images = prepare(build_timm(), (64, 96))
    model, images = model.double(), images.double()
    classes = torch.tensor([1, 4])
    forward = run_forward(model, images, gradients=True)
    effects = compute_head_effects(forward, forward.score(classes))
    assert effects.shape == (2, 3, 3)
    for number, layer in enumerate(forward.record.layers):
        for head in range(3):
            scores = []
            for sign in (1, -1):
                remove = gate(layer, head, 1 + sign * STEP)
                scores.append(measure_scores(model, images, classes))
                remove()
            expected = (scores[0] - scores[1]) / (2 * STEP)
            torch.testing.assert_close(effects[:, number, head], expected, rtol=1e-5, atol=1e-7)


def test_torchvisions_heads_are_told_apart(build: Callable[..., tuple[nn.Module, Tensor]]) -> None:
    """Its layers keep the projection of all heads together: a head's part of the output's weights
    at zero ablates it."""
    model, images = build("torchvision")
    model, images = model.double(), images.double()
    classes = torch.tensor([1, 4])
    forward = run_forward(model, images, gradients=True)
    effects = compute_head_effects(forward, forward.score(classes))
    size = 24 // 3
    for number, layer in enumerate(forward.record.layers):
        weight = layer.module.out_proj.weight
        whole = weight.data.clone()
        for head in range(3):
            scores = []
            for sign in (1, -1):
                weight.data[:, size * head : size * (head + 1)] *= 1 + sign * STEP
                scores.append(measure_scores(model, images, classes))
                weight.data.copy_(whole)
            expected = (scores[0] - scores[1]) / (2 * STEP)
            torch.testing.assert_close(effects[:, number, head], expected, rtol=1e-5, atol=1e-7)


def train_on_digits() -> tuple[nn.Module, Tensor, Tensor]:
    """A model of 24 heads, and held-out images that it gets right with their classes. A few
    seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planted_evidence, "EPOCHS", 8)
        build = planted_evidence.VisionTransformer
        patch.setattr(
            planted_evidence,
            "VisionTransformer",
            lambda **sizes: build(**sizes | {"depth": 4, "num_heads": 6}),
        )
        model, images, classes, _ = planted_evidence.train()
    return model, images, classes


@pytest.mark.extended
def test_heads_are_ranked_as_real_ablation_ranks_them(build_once: BuildOnce) -> None:
    def build(folder: Path) -> None:
        folder.mkdir()
        torch.save(train_on_digits(), folder / "heads.pt")

    file = build_once("heads", build) / "heads.pt"
    model, images, classes = torch.load(file, weights_only=False)
    images, classes = images[:128], classes[:128]
    forward = run_forward(model, images, gradients=True)
    effects = compute_head_effects(forward, forward.score(classes))
    whole = measure_scores(model, images, classes)
    drops = torch.zeros_like(effects)
    for number, layer in enumerate(forward.record.layers):
        for head in range(layer.num_heads):
            remove = gate(layer, head, 0.0)
            drops[:, number, head] = whole - measure_scores(model, images, classes)
            remove()
    importance = effects.abs().mean(dim=0).flatten()
    correlation = spearmanr(importance, drops.abs().mean(dim=0).flatten()).statistic
    assert correlation >= 0.9
    # nor is it the size of what a head writes, or its place
    shuffled = spearmanr(importance, drops.abs().mean(dim=0).T.flatten()).statistic
    assert shuffled < 0.7


def test_the_table_names_the_heads_that_a_class_depends_on() -> None:
    effects = torch.zeros(3, 2, 2)
    effects[:2, 1, 0] = torch.tensor([-3.0, 1.0])
    effects[:2, 0, 1] = 0.5
    effects[2, 0, 0] = 4.0
    measured = HeadEffects(effects, torch.tensor([1, 1, 0]), ("cat", "dog"))
    assert measured.find_most_important(1, 2) == [(1, 0), (0, 1)]
    assert measured.importance(1)[1, 0] == 2
    cat, dog = measured.table.splitlines()[2:]
    assert cat.startswith("| cat | 1 | layer 0 head 0 (+4.00), ")
    assert dog.startswith("| dog | 2 | layer 1 head 0 (-1.00), layer 0 head 1 (+0.50)")


def test_heads_are_measured_of_images() -> None:
    model, _ = prepare(build_timm(), (64, 96))
    bundle = Bundle.from_model(
        model, class_names=tuple("abcde"), preprocess=Preprocess(image_size=(64, 96))
    )
    photos = [Image.effect_noise((96, 64), 10 + 30 * number).convert("RGB") for number in range(3)]
    measured = measure_heads(bundle, photos, target="d", batch_size=2)
    assert measured.effects.shape == (3, 3, 3)
    assert measured.targets.tolist() == [3, 3, 3]
    alone = measure_heads(bundle, photos[2], target="d")
    torch.testing.assert_close(alone.effects[0], measured.effects[2], rtol=1e-4, atol=1e-6)
