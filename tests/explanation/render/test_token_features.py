"""Colours, norms and similarities of tokens are those of numpy's decompositions, in eight bits."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.render.token_details import measure_tokens
from vit.explanation.render.token_features import (
    TokenFeatures,
    count_feature_bytes,
    measure_features,
)

Build = Callable[..., tuple[nn.Module, Tensor]]
LAYERS, TOKENS, WIDTH = 3, 25, 24


@pytest.fixture
def forward(ours: Build) -> Forward:
    model, images = ours()
    return run_forward(model, images, block_tokens=True)


def measure(forward: Forward, max_bytes: int = 10**6) -> TokenFeatures:
    features = measure_features(forward, 1, max_bytes=max_bytes)
    assert features is not None
    return features


def tokens_of(forward: Forward, layer: int) -> np.ndarray:
    tokens = forward.record.layers[layer].block_tokens
    assert tokens is not None
    return tokens[1].double().numpy()


def test_colours_are_the_first_principal_components(forward: Forward) -> None:
    colours = measure(forward).colours.numpy().astype(float)
    assert colours.shape == (LAYERS, TOKENS - 1, 3)
    for layer in range(LAYERS):
        patches = tokens_of(forward, layer)[1:]
        patches = patches - patches.mean(axis=0)
        _, _, directions = np.linalg.svd(patches, full_matrices=False)
        for channel in range(3):
            scores = patches @ directions[channel]
            scores *= np.sign(scores[np.abs(scores).argmax()])
            expected = (scores - scores.min()) / np.ptp(scores) * 255
            assert np.abs(colours[layer, :, channel] - expected).max() < 0.6


def test_norms_and_cosines_are_those_of_the_tokens(forward: Forward) -> None:
    features = measure(forward)
    assert features.coordinates is not None
    assert features.scales is not None
    for layer in range(LAYERS):
        tokens = tokens_of(forward, layer)
        norms = np.linalg.norm(tokens, axis=1)
        restored = features.norms[layer].double() / 255 * features.max_norms[layer]
        assert np.abs(restored.numpy() - norms).max() < norms.max() / 500
        directions = tokens / norms[:, None]
        coordinates = features.coordinates[layer].double() * features.scales[layer]
        cosines = (coordinates @ coordinates.T).numpy()
        assert np.abs(cosines - directions @ directions.T).max() < 0.02


def test_fewer_bytes_keep_fewer_directions(forward: Forward) -> None:
    for count in (32, 20, 8):
        max_bytes = count_feature_bytes(forward, count)
        coordinates = measure(forward, max_bytes).coordinates
        assert coordinates is not None
        assert coordinates.shape == (LAYERS, TOKENS, count)
        features = measure(forward, max_bytes)
        sizes = [part.nbytes for part in (features.colours, features.norms, coordinates)]
        assert sum(sizes) == max_bytes
    assert measure(forward, count_feature_bytes(forward, 7)).coordinates is None
    assert measure_features(forward, 1, max_bytes=count_feature_bytes(forward, 0) - 1) is None


def test_a_page_without_room_for_layers_has_the_features(forward: Forward) -> None:
    targets = torch.zeros(1, dtype=torch.long)
    before = (4 + 3) * LAYERS * TOKENS + TOKENS**2
    for room in (count_feature_bytes(forward), count_feature_bytes(forward, 10)):
        details = measure_tokens(forward, 1, targets=targets, max_bytes=before + room)
        assert details.features is not None
        assert [rows.layer for rows in details.attention] == [None]
