"""The forward passes of a summary: predictions, maps, and images without some patches."""

from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, UInt8
from scipy.special import expit, softmax
from torch import Tensor

from vit.bundle import Bundle
from vit.explanation.capture.forward import Forward, run_forward
from vit.explanation.capture.reader import read_bundle
from vit.explanation.capture.tokens import Grid
from vit.explanation.checks.token_ablation import build_removal, compute_without
from vit.explanation.methods.maps import compute_maps
from vit.explanation.targets import CLASS
from vit.model.logits import at_least_float32, compute_logits
from vit.prediction.decision import decide_classes, decide_labels
from vit.prediction.probabilities import Bools, Ints
from vit.runtime.device import copy_to_device
from vit.runtime.tensors import Images

Relevance = Float[np.ndarray, "n P"]
# the patch tokens that enter S of the blocks
PatchTokens = Float[np.ndarray, "n P S D"]
PatchMask = Bool[np.ndarray, "n P"]


class Explained(NamedTuple):
    """Images of a class with the relevance and the tokens of their patches."""

    indices: Ints
    relevance: Relevance
    tokens: PatchTokens


class Passes:
    """A model and the images on which it runs.

    Args:
        bundle: The model.
        pixels: The images as the model sees them.
        method: The map method.
        batch_size: Images at a time.

    Attributes:
        predicted: The prediction for each image, see `decide`.
        grid: Rows and columns of patches.
        token_bytes: Memory that the tokens of one image take.
    """

    def __init__(
        self, bundle: Bundle, pixels: UInt8[np.ndarray, "n H W 3"], *, method: str, batch_size: int
    ) -> None:
        self.bundle = bundle
        self.pixels = torch.from_numpy(pixels)
        self.method = method
        self.batch_size = batch_size
        everything = np.arange(len(pixels))
        with torch.no_grad():
            logits = [
                compute_logits(bundle.model, images).cpu() for images in self._read(everything)
            ]
        self.predicted = self.decide(torch.cat(logits) / bundle.temperature)

        first = self._run(self._normalize(everything[:1]))
        self.grid: Grid = first.grid
        self.token_bytes = _take_tokens(first).nbytes

    def explain(
        self, indices: Ints, class_index: int, advance: Callable[[float], object]
    ) -> Explained:
        """Compute the relevance of each patch for a class, whose sum is one in each image."""
        relevance = []
        tokens = []
        for images in self._read(indices):
            forward, _, (maps,) = compute_maps(
                read_bundle(self.bundle),
                images,
                methods=[self.method],
                target=CLASS.with_classes(torch.full((len(images),), class_index)),
                keep="block tokens",
            )
            # evidence against a class is no evidence for it
            values = maps.values[:, 0].flatten(1).clamp_min(0)
            relevance.append((values / values.sum(dim=1, keepdim=True).clamp_min(1e-12)).cpu())
            tokens.append(_take_tokens(forward))
            advance(len(images))
        return Explained(indices, torch.cat(relevance).numpy(), np.concatenate(tokens))

    def find_tokens(self, indices: Ints) -> PatchTokens:
        """Compute the tokens of images without their maps."""
        return np.concatenate([_take_tokens(self._run(images)) for images in self._read(indices)])

    def leave_out(self, indices: Ints, removed: PatchMask) -> Float[Tensor, "R C"]:
        """Compute the logits of the images at `indices` without the patches `removed`, divided by
        the temperature of the model file."""
        unique, places = np.unique(indices, return_inverse=True)
        device = self.bundle.device
        compute_kept = build_removal(
            read_bundle(self.bundle),
            self._normalize(unique),
            grid=self.grid,
            batch_size=self.batch_size,
        )
        logits = compute_without(
            compute_kept,
            torch.from_numpy(places).to(device),
            torch.from_numpy(removed).to(device),
        )
        return logits / self.bundle.temperature

    def decide(self, logits: Float[Tensor, "R C"]) -> Ints | Bools:
        """Return what is predicted from logits that are divided by the temperature: a class [R], or
        the labels [R, C]."""
        values = logits.double().cpu().numpy()
        if self.bundle.is_multilabel:
            return decide_labels(self.bundle, expit(values))
        return decide_classes(self.bundle, softmax(values, axis=1))

    def compute_log_odds(
        self, logits: Float[Tensor, "R C"], class_index: int
    ) -> Float[Tensor, " R"]:
        """Compute the log-odds of a class against the others, or of a label."""
        if self.bundle.is_multilabel:
            return logits[:, class_index]
        others = logits.clone()
        others[:, class_index] = -torch.inf
        return logits[:, class_index] - others.logsumexp(dim=1)

    def _normalize(self, indices: Ints) -> Images:
        pixels = copy_to_device(self.pixels[indices], self.bundle.device)
        return self.bundle.preprocess.normalize(pixels)

    def _read(self, indices: Ints) -> Iterator[Images]:
        for start in range(0, len(indices), self.batch_size):
            yield self._normalize(indices[start : start + self.batch_size])

    def _run(self, images: Images) -> Forward:
        reader = read_bundle(self.bundle)
        # raises ValueError for a model without attention
        reader.build_layers()
        return run_forward(reader, images, block_tokens=True, verify=False)


def has_class(answers: Ints | Bools, class_index: int) -> Bools:
    """Return which of n images have a class [n], by their classes [n] or their labels [n, C]."""
    found = answers == class_index if answers.ndim == 1 else answers[:, class_index]
    return np.asarray(found, dtype=bool)


def _take_tokens(forward: Forward) -> PatchTokens:
    """Return the patch tokens that enter the last block, which every pooling reads, and the blocks
    at one and two thirds of the depth, where patches that look alike still have similar tokens."""
    layers = forward.record.layers
    last = len(layers) - 1
    # each block counts alike in a cluster, see `clusters._center`
    parts = []
    for place in sorted({len(layers) // 3, 2 * len(layers) // 3, last}):
        tokens = layers[place].block_input
        assert tokens is not None
        parts.append(at_least_float32(tokens.detach())[:, forward.num_prefix_tokens :])
    return torch.stack(parts, dim=2).cpu().numpy()
