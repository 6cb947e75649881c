"""Photos much larger than the weights' size are trained at twice that size exactly where a probe is
clearly better at it."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import Launcher, SaveModel
from vit.config import load_config
from vit.training import automatic, image_size
from vit.training.automatic import choose_config

MakePhotos = Callable[[str, int], Path]


@pytest.fixture
def make_photos(tmp_path: Path) -> MakePhotos:
    """make_photos(name, period) makes 2 × 80 photos of 64 px, with stripes of a period or none."""

    def make(name: str, period: int) -> Path:
        rng = np.random.default_rng(0)
        for label in ("plain", "striped"):
            (tmp_path / name / label).mkdir(parents=True)
            for number in range(80):
                pixels = rng.integers(80, 170, (16, 16)).repeat(4, axis=0).repeat(4, axis=1)
                if label == "striped":
                    # as bright as the others on average
                    pixels += np.where(np.arange(64) % period < period / 2, 20, -20)
                image = Image.fromarray(pixels.astype(np.uint8))
                image.save(tmp_path / name / label / f"{number}.png")
        return tmp_path / name

    return make


@pytest.fixture
def init(save_model: SaveModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Overrides for weights of images of 16 px, with time enough on any machine."""
    monkeypatch.setattr(image_size, "_SECONDS_A_MINUTE", 1000)
    path = save_model(tmp_path / "weights" / "model.safetensors", class_names=("a", "b"))
    return [f"model.init={path}", "train.device=cpu"]


def test_details_that_the_own_size_loses_get_twice_the_size_and_a_resumed_run_keeps_it(
    cli: Launcher,
    make_photos: MakePhotos,
    init: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    photos = make_photos("fine", 4)  # one pixel at 16 px
    run = ["train", photos, "-o", tmp_path / "run", *init, "train.max_steps=1"]
    shown = " ".join(cli.succeed(*run).text.split())
    assert "a linear probe of 100 photos: " in shown
    config = load_config(tmp_path / "run" / "config.yaml")
    assert (config.data.image_size, config.model.probe) == (32, 200)
    assert config.model.freeze == "backbone"
    monkeypatch.setattr(image_size, "build_run", None)  # nothing is measured again
    assert "resuming" in cli.succeed(*run, "--resume").text


def test_a_gpu_trains_further_at_twice_the_size(
    make_photos: MakePhotos, init: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(automatic, "choose_device", lambda name: torch.device("cuda"))
    # enough images to tell whether it helps
    overrides = [*init, "data.validation_fraction=0.2"]
    config, choices, _ = choose_config(make_photos("fine", 4), overrides)
    assert (config.data.image_size, config.model.probe, config.model.freeze) == (32, True, "none")
    assert "all minutes" not in choices["image size"]


def test_details_that_both_sizes_show_or_lose_keep_the_own_size(
    make_photos: MakePhotos, init: list[str]
) -> None:
    config, choices, _ = choose_config(make_photos("coarse", 32), init)
    assert config.data.image_size is None
    assert "that of the weights; data.image_size=32 shows more" in choices["image size"]
    config, choices, _ = choose_config(make_photos("finest", 2), init)
    assert (config.data.image_size, config.model.probe) == (None, True)
    assert "a linear probe of 100 photos: " in choices["image size"]


def test_nothing_is_measured_where_it_is_not_asked_for_or_would_take_too_long(
    make_photos: MakePhotos, init: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    photos = make_photos("fine", 4)
    monkeypatch.setattr(image_size, "_SECONDS_A_MINUTE", 0)
    assert "shows more, in 5 times the time" in choose_config(photos, init)[1]["image size"]
    monkeypatch.setattr(image_size, "build_run", None)
    for override in ("train.max_minutes=1.9", "data.validation_fraction=0"):
        told = choose_config(photos, [*init, override])[1]["image size"]
        assert "that of the weights; data.image_size=32 shows more, in 5 times the time" in told
    config, choices, _ = choose_config(photos, [*init, "data.image_size=16"])
    assert config.data.image_size == 16
    assert "image size" not in choices
    monkeypatch.setattr("vit.training.automatic.measure_sample", lambda *_, **__: (31, False))
    assert choose_config(photos, init)[1]["image size"] == "auto (that of the weights)"
