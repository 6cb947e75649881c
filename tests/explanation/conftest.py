"""Small models with weights large enough that attention is not uniform, and one that was
trained."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn

from tests.browser import browser
from tests.conftest import BuildOnce
from tests.explanation import model_zoo, planted_evidence

__all__ = ["browser"]


@pytest.fixture
def build() -> Callable[[str], tuple[nn.Module, torch.Tensor]]:
    """A model of `model_zoo.MODELS`, in evaluation mode, and two images for it."""

    def make(family: str) -> tuple[nn.Module, torch.Tensor]:
        return model_zoo.build(family)

    return make


@pytest.fixture
def ours() -> Callable[..., tuple[nn.Module, torch.Tensor]]:
    """Our model with the given arguments, and two images for it."""
    return lambda **arguments: prepare(model_zoo.build_ours(**arguments))


@pytest.fixture
def from_timm() -> Callable[..., tuple[nn.Module, torch.Tensor]]:
    """A timm model with the given name and arguments, and two images for it."""
    return lambda *name, **arguments: prepare(model_zoo.build_timm(*name, **arguments))


def prepare(model: nn.Module) -> tuple[nn.Module, torch.Tensor]:
    size = model.patch_embed.img_size
    return model_zoo.prepare(model, size if isinstance(size, tuple) else (size, size))


@dataclass(frozen=True)
class Trained:
    """A model of scanned digits, where a glyph on any patch decides the eleventh class, and images
    held out."""

    model: nn.Module
    images: torch.Tensor  # [n, 3, 24, 24], classified correctly
    classes: torch.Tensor
    glyph: torch.Tensor  # [n], the patch of 4×4 with the glyph; -1 without


@pytest.fixture(scope="session")
def trained(build_once: BuildOnce) -> Trained:
    """Ten seconds of training."""

    def build(folder: Path) -> None:
        folder.mkdir()
        torch.save(planted_evidence.train(), folder / "trained.pt")

    file = build_once("planted", build) / "trained.pt"
    model, images, classes, glyph = torch.load(file, weights_only=False)
    assert len(images) > 0.8 * planted_evidence.HELD_OUT
    return Trained(model, images, classes, glyph)
