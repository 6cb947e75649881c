"""Why one class is taken for another: what alone separates two classes comes first, and every answer
that is said to turn does in a real forward pass."""

import numpy as np
import pytest
import torch
from torch import nn

import vit
from tests.explanation.keep_tokens import keep_tokens
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.evaluation.report.contrast import CONTRAST_METHODS, _list_counts, contrast_errors
from vit.model.vision_transformer import VisionTransformer

GRID, PATCH = 4, 6


def plant(places: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Noise, with a bright patch at each place that is not negative."""
    side = GRID * PATCH
    pixels = random.integers(0, 100, (len(places), side, side, 3))
    for image, place in zip(pixels, places.tolist(), strict=True):
        if place >= 0:
            top, left = (PATCH * number for number in divmod(place, GRID))
            image[top : top + PATCH, left : left + PATCH] += 120
    return pixels.astype(np.uint8)


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    """A bright patch anywhere makes an image a "lamp", nothing else does."""
    torch.manual_seed(0)
    random = np.random.default_rng(0)
    model = VisionTransformer(
        img_size=GRID * PATCH, patch_size=PATCH, num_classes=2, embed_dim=24, depth=2,
        num_heads=2, global_pool="avg",
    )  # fmt: skip
    bundle = Bundle.from_model(
        model, class_names=("wall", "lamp"), preprocess=Preprocess((GRID * PATCH, GRID * PATCH))
    )
    optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-3)
    for _ in range(80):
        labels = random.integers(0, 2, 32)
        places = np.where(labels == 1, random.integers(0, GRID**2, 32), -1)
        inputs = bundle.preprocess.normalize(torch.from_numpy(plant(places, random)))
        loss = nn.functional.cross_entropy(model(inputs), torch.from_numpy(labels))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    return bundle


def answer_without(bundle: Bundle, pixels: np.ndarray, removed: list[int]) -> int:
    images = bundle.preprocess.normalize(torch.from_numpy(pixels[None]))
    # both models have 4 × 4 patches
    kept = [patch for patch in range(GRID**2) if patch not in removed]
    with torch.no_grad(), keep_tokens(bundle.model, torch.tensor([kept])):
        return int(bundle.model(images).argmax())


def test_what_alone_separates_two_classes_is_first(bundle: Bundle) -> None:
    """Lamps whose label says "wall"."""
    places = np.arange(GRID**2)
    pixels = plant(places, np.random.default_rng(1))
    contrasts = contrast_errors(
        bundle,
        pixels,
        labels=np.zeros(len(pixels), np.int64),
        predicted=np.ones(len(pixels), np.int64),
    )
    for place, contrast in zip(places.tolist(), contrasts, strict=True):
        # the removal gradient is a first order, and near 0 for a patch that decides alone
        assert contrast.maps["libra-fullgrad"].argmax() == place
        assert set(contrast.maps) == set(CONTRAST_METHODS)
        assert contrast.removed == [place]
        assert contrast.answer == 0
        assert answer_without(bundle, pixels[place], contrast.removed) == 0
        assert answer_without(bundle, pixels[place], []) == 1


def test_every_answer_that_turns_does_so_in_a_forward_pass(tiny_bundle: Bundle) -> None:
    result = vit.evaluate(tiny_bundle, data="digits", num_examples=0)
    scores = result.scores
    wrong = np.flatnonzero(~scores.correct)[:20]
    assert len(wrong)
    pixels = np.concatenate([result.images.read(index, index + 1) for index in wrong])
    contrasts = contrast_errors(
        tiny_bundle, pixels, labels=scores.labels[wrong], predicted=scores.predicted[wrong]
    )
    num_turned = 0
    for image, predicted, contrast in zip(pixels, scores.predicted[wrong], contrasts, strict=True):
        if contrast.answer is not None:
            num_turned += 1
            assert contrast.answer != predicted
            assert answer_without(tiny_bundle, image, contrast.removed) == contrast.answer
    assert num_turned


def test_few_patches_are_tried_first_and_no_more_than_a_quarter() -> None:
    assert _list_counts(16) == [1, 2, 3, 4]
    counts = _list_counts(256)
    assert counts[0] == 1
    assert counts[-1] <= 64
    assert len(counts) < 16
