"""The cost of a model that can be worked out by hand."""

import pytest
import torch

from vit.bundle import Bundle
from vit.evaluation.cost import measure_cost
from vit.model.presets import compute_flops
from vit.model.vision_transformer import VisionTransformer


def test_counts_are_the_architectures_and_times_are_ordered(bundle: Bundle) -> None:
    assert isinstance(bundle.model, VisionTransformer)
    cost = measure_cost(bundle.model, torch.zeros(16, 3, 8, 8), precision="float32")
    assert cost.flops_per_image == compute_flops(bundle.model.architecture)
    assert cost.parameters == sum(p.numel() for p in bundle.model.parameters())
    assert cost.batch_size == 16
    assert 0 < cost.latency_p50_seconds <= cost.latency_p95_seconds < 1
    assert cost.images_per_second > 1 / cost.latency_p50_seconds  # a batch is worth it
    assert cost.peak_memory_of == "process"
    assert cost.peak_memory_bytes > 50 * 2**20


def test_a_linear_model_costs_two_operations_a_weight() -> None:
    class Linear(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(12, 5, bias=False)

        def forward_features(self, images: torch.Tensor) -> torch.Tensor:
            return images.flatten(1)

        def forward_head(self, features: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = self.head(features)
            return logits

    cost = measure_cost(Linear(), torch.zeros(2, 3, 2, 2), precision="float32")
    assert (cost.parameters, cost.flops_per_image) == (60, 120)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "float16"])
def test_precision_does_not_change_the_count(bundle: Bundle, precision: str) -> None:
    cost = measure_cost(bundle.model, torch.zeros(2, 3, 8, 8), precision=precision)  # type: ignore[arg-type]
    assert cost.flops_per_image == compute_flops(bundle.model.architecture)  # type: ignore[arg-type]
