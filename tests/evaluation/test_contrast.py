"""Why one class is taken for another: what alone separates two classes comes first, and every answer
that is said to turn does in a real forward pass."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from tests.explanation.keep_tokens import keep_tokens
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.evaluation.metrics import score_logits
from vit.evaluation.report.contrast import Mistake, choose_mistakes, explain_mistakes
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
    with torch.no_grad(), keep_tokens(bundle.model, torch.tensor([kept]), images):
        return int(bundle.model(images).argmax())


def test_what_alone_separates_two_classes_is_first(bundle: Bundle) -> None:
    """Lamps whose label says "wall"."""
    places = np.arange(GRID**2)
    pixels = plant(places, np.random.default_rng(1))
    mistakes = [
        Mistake(index, place=0, predicted=1, is_missed=True) for index in range(len(pixels))
    ]
    contrasts = explain_mistakes(bundle, mistakes, list(pixels))
    for place, contrast in zip(places.tolist(), contrasts, strict=True):
        assert contrast.values.argmax() == place
        assert contrast.removed == [place]
        assert contrast.answer == 0
        assert answer_without(bundle, pixels[place], contrast.removed) == 0
        assert answer_without(bundle, pixels[place], []) == 1


def test_the_clearest_mistakes_are_chosen() -> None:
    logits = np.random.default_rng(0).normal(size=(200, 4)).astype(np.float32)
    marks = np.random.default_rng(1).random((200, 4)) < 0.5
    for labels in (np.arange(200) % 4, marks):
        scores = score_logits(logits, labels)
        mistakes = choose_mistakes(scores, 8)
        if scores.is_multilabel:
            clarity = np.abs(marks - scores.probabilities) * (marks != scores.predicted)
            # the two clearest of each label
            best, second = np.sort(clarity, axis=0)[:-3:-1]
            found = [clarity[each.image, each.place] for each in mistakes]
            assert found == [*np.sort(best)[::-1].tolist(), *np.sort(second)[::-1].tolist()]
        else:
            clarity = scores.confidence * ~scores.correct
            found = [clarity[each.image] for each in mistakes]
            assert found == np.sort(clarity)[::-1][:8].tolist()
            assert all(labels[each.image] == each.place != each.predicted for each in mistakes)


def test_a_label_turns_in_a_forward_pass(bundle: Bundle) -> None:
    """A lamp that isn't labelled as one: without its patch, the label isn't found."""
    labels = replace(bundle, data={"task": "multilabel"})
    pixels = plant(np.array([5, 9]), np.random.default_rng(2))
    mistakes = [Mistake(index, place=1, predicted=1, is_missed=False) for index in range(2)]
    contrasts = explain_mistakes(labels, mistakes, list(pixels))
    for place, image, contrast in zip((5, 9), pixels, contrasts, strict=True):
        assert contrast.values.argmax() == place
        assert contrast.removed == [place]
        assert contrast.answer is None
        assert answer_without(labels, image, contrast.removed) == 0
