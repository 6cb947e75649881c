"""Features of the output tokens of each layer, in few bytes: colours from their first principal
components, their similarities and their norms.

Everything is stored in 8 bits: a colour as a fraction of the component's range over the patches, a
norm as a fraction of the layer's largest. Similarities (cosines) would take N² bytes for each
layer. Instead the tokens' coordinates in K directions are stored, the first eigenvectors of the
matrix of cosines: the product of two rows of coordinates is their cosine.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int8, UInt8
from torch import Tensor
from torch.nn import functional as F

from vit.explanation.capture.forward import Forward
from vit.model.logits import at_least_float32

MAX_DIRECTIONS = 32
_MIN_DIRECTIONS = 8  # with fewer, different tokens look alike
_MAX_INT8 = 127


class TokenFeatures(NamedTuple):
    """Features of the tokens of one image, for each layer.

    Attributes:
        colours: Colours of the patches: red, green and blue are the first principal components.
        norms: Norms of all tokens, in parts of 255 of `max_norms`.
        max_norms: Largest norm of each layer.
        coordinates: Coordinates; [i] · [j] · scale² is the cosine of tokens i and j.
        scales: Scale of the coordinates of each layer.
    """

    colours: UInt8[Tensor, "L P 3"]
    norms: UInt8[Tensor, "L N"]
    max_norms: Float[Tensor, " L"]
    coordinates: Int8[Tensor, "L N K"] | None
    scales: Float[Tensor, " L"] | None


def count_feature_bytes(forward: Forward, num_directions: int = MAX_DIRECTIONS) -> int:
    """Return the size of an image's features in bytes."""
    layers = forward.record.layers
    rows, columns = forward.grid
    return len(layers) * (3 * rows * columns + layers[0].num_tokens * (1 + num_directions))


@torch.no_grad()
def measure_features(forward: Forward, image: int, *, max_bytes: int) -> TokenFeatures | None:
    """Measure the features of one image of the batch.

    Args:
        forward: A forward pass with the output of each block.
        image: Place of the image in the batch.
        max_bytes: Largest size of the features. With fewer bytes there are fewer directions, then
            no coordinates, then nothing.
    """
    layers = forward.record.layers
    room = max_bytes - count_feature_bytes(forward, num_directions=0)
    if room < 0 or layers[0].block_tokens is None:
        return None
    num_directions = min(MAX_DIRECTIONS, room // (len(layers) * layers[0].num_tokens))

    colours = []
    norms = []
    coordinates = []
    for layer in layers:
        assert layer.block_tokens is not None
        tokens = at_least_float32(layer.block_tokens[image].detach())  # [N, D]
        # only those of patches, which are drawn on the photo
        colours.append(_colour_patches(tokens[forward.num_prefix_tokens :]))
        norms.append(tokens.norm(dim=1))
        if num_directions >= _MIN_DIRECTIONS:
            # tokens of length one, so that products of their coordinates are cosines
            coordinates.append(_find_coordinates(F.normalize(tokens, dim=1), num_directions))

    all_norms = torch.stack(norms)
    max_norms = all_norms.amax(dim=1)
    tiny = torch.finfo(max_norms.dtype).tiny
    fractions = all_norms / max_norms[:, None].clamp_min(tiny)
    quantised = scales = None
    if coordinates:
        stacked = torch.stack(coordinates)  # [L, N, K]
        # one scale for each layer, because 8 bits of a common one would leave a quiet layer few
        # levels
        scales = stacked.abs().amax(dim=(1, 2)).clamp_min(tiny) / _MAX_INT8
        quantised = (stacked / scales[:, None, None]).round().to(torch.int8)
        scales = scales.float()
    return TokenFeatures(
        colours=torch.stack(colours),
        norms=(fractions * 255).round().to(torch.uint8),
        max_norms=max_norms.float(),
        coordinates=quantised,
        scales=scales,
    )


def _colour_patches(patches: Float[Tensor, "P D"]) -> UInt8[Tensor, "P 3"]:
    """Compute the first three principal components, each from its smallest value to its largest."""
    scores = _find_coordinates(patches - patches.mean(dim=0), 3)
    low = scores.amin(dim=0)
    span = (scores.amax(dim=0) - low).clamp_min(torch.finfo(scores.dtype).tiny)
    return ((scores - low) / span * 255).round().to(torch.uint8)


def _find_coordinates(rows: Float[Tensor, "N D"], count: int) -> Float[Tensor, "N count"]:
    """Compute the rows' coordinates in the first directions of their singular value decomposition;
    zero in directions that they don't have. The largest entry of each direction is positive."""
    # the eigenvectors of N × N products are enough; an SVD of the rows computes directions too
    eigenvalues, eigenvectors = torch.linalg.eigh(rows @ rows.T)  # ascending
    rank = min(count, len(eigenvalues))
    coordinates = eigenvectors[:, -rank:] * eigenvalues[-rank:].clamp_min(0).sqrt()
    # the direction with the largest eigenvalue comes first
    coordinates = coordinates.flip(1)
    # the sign of an eigenvector is arbitrary, and colours must not depend on it
    largest = coordinates.abs().argmax(dim=0, keepdim=True)
    coordinates = coordinates * coordinates.gather(0, largest).sign()
    return F.pad(coordinates, (0, count - rank))
