"""Training with several labels an image: the loss, and what a run is measured by."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import vit
from vit.training.losses import build_loss
from vit.training.result import TrainingResult
from vit.training.train_step import TrainStep

NAMES = ("bird", "cat", "dog")
NUM_IMAGES = 48
RNG = np.random.default_rng(0)
PIXELS = RNG.integers(0, 256, (NUM_IMAGES, 8, 8, 3), dtype=np.uint8)
MARKS = RNG.random((NUM_IMAGES, 3)) < (0.2, 0.5, 0.7)
LABELS = [[name for name, mark in zip(NAMES, row, strict=True) if mark] for row in MARKS]
# the label "cat" is a red image, so that there is something to learn
PIXELS[MARKS[:, 1], :, :, 0] //= 4
CONFIG: dict[str, Any] = {
    "data": {"image_size": 8},
    "augment": {"mixup": 0.2, "cutmix": 1.0},
    "model": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "optimizer": {"lr": 0.01},
    "train": {
        "epochs": 4, "batch_size": 8, "device": "cpu", "label_smoothing": 0.1, "ema_decay": 0.9,
        "class_balance": "weights",
    },
}  # fmt: skip


def build_step(*, grad_accum_steps: int, **options: Any) -> TrainStep:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(12, 3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, fused=True)
    loss = build_loss(multilabel=True, **options)
    return TrainStep(
        model,
        optimizer,
        lambda step: 1.0,
        loss,
        precision="float32",
        grad_accum_steps=grad_accum_steps,
    )


def test_the_loss_is_the_weighted_binary_cross_entropy_of_smoothed_labels() -> None:
    images = torch.randn(6, 3, 2, 2, generator=torch.manual_seed(1))
    targets = torch.tensor([[1.0, 0, 0], [0, 0, 0], [1, 1, 1], [0, 1, 0], [0.3, 0, 0.7], [0, 0, 1]])
    weights = torch.tensor([4.0, 1.0, 0.5])
    losses = []
    for num_parts in (1, 3):
        step = build_step(label_smoothing=0.1, class_weights=weights, grad_accum_steps=num_parts)
        result = step(images, targets)
        logits = step.model(images).double()
        smoothed = (0.9 * targets + 0.05).double()
        expected = -(
            weights * smoothed * F.logsigmoid(logits) + (1 - smoothed) * F.logsigmoid(-logits)
        ).mean()
        assert float(result.loss) == pytest.approx(float(expected.detach()), rel=1e-6)
        is_right = ((logits > 0) == (targets > 0.5)).all(dim=1)
        assert int(result.correct) == int(is_right.sum())
        losses.append(float(result.loss))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    return vit.train(
        CONFIG,
        dataset=(PIXELS, LABELS),
        class_names=NAMES,
        output=tmp_path_factory.mktemp("run") / "r",
    )


def test_a_run_is_measured_by_average_precision(run: Any) -> None:
    last = run.metrics[-1]
    assert {"train_exact_match", "val_exact_match", "val_map", "val_macro_f1"} <= last.keys()
    assert "val_top1" not in last
    assert run.best_map == max(epoch["val_map"] for epoch in run.metrics)
    assert run.best_top1 is None
    assert run.bundle.is_multilabel
    with pytest.raises(ValueError, match="select_by=map is for several labels"):
        vit.train(
            {**CONFIG, "train": {**CONFIG["train"], "select_by": "map"}},
            dataset=(PIXELS, MARKS.argmax(axis=1)),
            output=run.directory.parent / "classes",
        )
