"""The tokens of frozen blocks are computed once and train the other blocks as the images would."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import SaveModel
from tests.training.conftest import flatten, run_until
from tests.training.test_resume import assert_equal_runs
from vit.config import load_config
from vit.data.preprocess import Preprocess
from vit.model.vision_transformer import VisionTransformer
from vit.training import tokens as tokens_module
from vit.training.data import build_train_loader
from vit.training.run import Run, build_run

MakeRun = Callable[..., Run]
FROZEN = [
    "data.image_size=8",
    "data.classes=[0,1,2]",
    "model.freeze=2",
    "train.batch_size=64",
    "train.epochs=2",
    "train.clip_grad=1.0",
    "train.precision=float32",
]


@pytest.fixture
def make_run(save_model: SaveModel, tmp_path: Path) -> MakeRun:
    """A run from weights of four blocks, two of which are frozen; more overrides come behind."""
    weights = save_model(
        tmp_path / "weights" / "model.safetensors",
        preprocess=Preprocess((8, 8)),
        img_size=8,
        patch_size=2,
        embed_dim=32,
        depth=4,
        num_heads=2,
    )

    def make(directory: Path, *overrides: str) -> Run:
        directory.mkdir(parents=True, exist_ok=True)
        config = load_config(None, [*FROZEN, f"model.init={weights}", *overrides])
        return build_run(config, directory=directory, device_name="cpu")

    return make


def read_losses(run: Run, *, num_epochs: int = 2) -> list[float]:
    loader = run.trainer.train_batches
    return [
        float(run.trainer.train_step(batch.images, batch.targets).loss)
        for epoch in range(num_epochs)
        for batch in loader.epoch(epoch)
    ]


def test_they_train_as_the_images_do(make_run: MakeRun, tmp_path: Path) -> None:
    # AdamW would take the noise in the gradient of the keys' biases, which is 0, for a direction
    overrides = ["augment.flip=random", "optimizer.name=sgd", "optimizer.lr=0.05"]
    runs = [
        make_run(tmp_path / name, f"data.pipeline={name}", *overrides)
        for name in ("resident", "tokens")
    ]
    assert [run.trainer.train_batches.tokens is None for run in runs] == [True, False]
    losses = [read_losses(run) for run in runs]
    assert len(losses[0]) == 12
    # batches of another size round float32 another way
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    first, second = (run.trainer.train_step.module.state_dict() for run in runs)
    for name in first:
        assert torch.allclose(first[name], second[name], atol=1e-5), name
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("flip", ["random", "alternating"])
def test_a_flip_takes_the_tokens_of_the_mirror_image(
    make_run: MakeRun, tmp_path: Path, flip: str
) -> None:
    run = make_run(tmp_path / "run", f"augment.flip={flip}")
    loader = run.trainer.train_batches
    model = run.trainer.train_step.module.eval()
    assert isinstance(model, VisionTransformer)
    batch = next(iter(loader.epoch(0)))
    image_batch = next(build_train_loader(run.data, device=torch.device("cpu")).epoch(0))
    assert torch.equal(batch.sample_ids, image_batch.sample_ids)
    with torch.no_grad():
        assert torch.allclose(batch.images, model.forward_frozen(image_batch.images), atol=1e-5)
        logits = model(image_batch.images)
        assert torch.allclose(model(batch.images), logits, atol=1e-5)
    # both views are among them
    pixels = np.array(run.data.train.pixels)[batch.sample_ids]
    plain = run.data.preprocess.normalize(torch.from_numpy(pixels))
    is_flipped = (image_batch.images - plain).abs().flatten(1).amax(dim=1) > 0.01
    assert 0 < is_flipped.sum() < len(is_flipped)


def test_a_resumed_run_ends_with_the_same_bytes(
    make_run: MakeRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = ["augment.flip=random", "train.checkpoint_every_steps=2", "model.drop_path_rate=.2"]
    whole = make_run(tmp_path / "whole", *overrides)
    whole.trainer.train()
    run_until(make_run(tmp_path / "broken", *overrides), 4)
    # the tokens are computed again, and memory that is short now doesn't change the run
    monkeypatch.setenv("VIT_CACHE", str(tmp_path / "other_cache"))
    monkeypatch.setattr(tokens_module, "fits_in_memory", lambda *_: False)
    broken = make_run(tmp_path / "broken", *overrides, "data.pipeline=tokens")
    broken.trainer.resume()
    run_until(broken, 9)
    resumed = make_run(tmp_path / "broken", *overrides, "data.pipeline=tokens")
    resumed.trainer.resume()
    resumed.trainer.train()
    assert_equal_runs(tmp_path / "whole", tmp_path / "broken")
    states = [flatten(run.trainer.train_step.state_dict()) for run in (whole, resumed)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


@pytest.mark.parametrize(
    "override",
    [
        "augment.color_jitter=0.2",
        "augment.resized_crop_scale=[0.5,1]",
        "augment.mixup=0.2",
        "model.freeze=none",
        "model.freeze=backbone",
        "data.pipeline=resident",
        "data.pipeline=workers",
    ],
)
def test_images_that_change_are_passed_at_every_step(
    make_run: MakeRun, tmp_path: Path, override: str
) -> None:
    run = make_run(tmp_path / "run", override)
    assert run.trainer.train_batches.tokens is None
    assert run.data.config.data.pipeline != "tokens"
    if "pipeline" not in override:
        with pytest.raises(ValueError, match=r"data\.pipeline=tokens needs frozen blocks"):
            make_run(tmp_path / "refused", override, "data.pipeline=tokens")
