"""The prediction set and the p-value of `vit.prediction.conformal`, made of operations that every
runtime has."""

from typing import Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from vit.bundle import Bundle
from vit.model.model_file import NUM_NEIGHBOURS
from vit.model.vision_transformer import VisionTransformer

# coverage of the prediction sets
COVERAGE = 0.95


class LogitsAndFeatures(nn.Module):
    """A model that gives its logits and the pooled features that its head reads."""

    def __init__(self, model: VisionTransformer) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Float[Tensor, "B 3 H W"]) -> tuple[Tensor, Tensor]:
        """Compute logits [B, C] and features [B, D]."""
        tokens = self.model.forward_features(images)
        return self.model.forward_head(tokens), self.model.pool(tokens, self.model.global_pool)


class Answers(nn.Module):
    """From logits and features to prediction sets and p-values.

    Args:
        threshold: Smallest probability, without a temperature, of a class in the set.
        training_features: Features [m, D] of training images, of length one.
        distances: Distances [n] of images that were not trained on, ascending.
    """

    training_features: Tensor
    distances: Tensor

    def __init__(self, threshold: float, training_features: Tensor, distances: Tensor) -> None:
        super().__init__()
        self.threshold = threshold
        self.register_buffer("training_features", training_features)
        self.register_buffer("distances", distances)

    @classmethod
    def from_bundle(cls, bundle: Bundle) -> Self | None:
        """Build it from a model file; None where the file lacks thresholds or features."""
        thresholds = bundle.metadata.get("conformal", {}).get("thresholds", {})
        threshold = thresholds.get(str(COVERAGE))
        if threshold is None or bundle.likeness is None:
            return None
        training_features = torch.from_numpy(bundle.likeness.training_features).float()
        return cls(
            threshold,
            # their lengths were rounded in float16
            nn.functional.normalize(training_features),
            torch.from_numpy(bundle.likeness.distances),
        )

    def forward(
        self, logits: Float[Tensor, "B C"], features: Float[Tensor, "B D"]
    ) -> tuple[Tensor, Tensor]:
        """Compute which classes are in the set, bool [B, C], and p-values [B]."""
        sets = logits.softmax(dim=-1) >= self.threshold
        units = features / features.norm(dim=1, keepdim=True).clamp(min=1e-12)
        cosines = units @ self.training_features.T  # [B, m]
        k = min(NUM_NEIGHBOURS, len(self.training_features))
        nearest = cosines.topk(k, dim=1).values[:, -1:]
        distances = (2 - 2 * nearest).clamp(min=0).sqrt()  # [B, 1]
        num_as_far = (self.distances >= distances).sum(dim=1)
        return sets, (num_as_far + 1).float() / (len(self.distances) + 1)
