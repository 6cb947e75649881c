"""Every sample gets its own fresh draw, and gets what one would do to it alone with those
parameters."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vit.data.augment import Augmentation, AugmentParams, sample_beta
from vit.data.image_ops import augment_images, mix_batch
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom

SIZE = (16, 20)
# pixels from -127.5 to 127.5
PREPROCESS = Preprocess(SIZE, mean=(0.5,) * 3, std=(1 / 255,) * 3)
IDS = torch.arange(200)


def pictures(count: int = 200) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (count, *SIZE, 3), dtype=torch.uint8, generator=generator)


def sample(
    augment: Augmentation, ids: Tensor = IDS, *, epoch: int = 0, size: tuple[int, int] = SIZE
) -> AugmentParams:
    rng = StatelessRandom(0, epoch, ids)
    return augment.sample(rng, PREPROCESS, size, mix=True)


def run(
    augment: Augmentation,
    images: Tensor | None = None,
    *,
    epoch: int = 0,
    size: tuple[int, int] = SIZE,
) -> Tensor:
    params = sample(augment, epoch=epoch, size=size)
    stored = pictures() if images is None else images
    return augment_images(stored, IDS, params, preprocess=PREPROCESS, size=size)


def test_crop_with_padding_is_a_shift_of_the_reflected_image_by_each_samples_own_draw() -> None:
    got, rng = run(Augmentation(crop_padding=4)), StatelessRandom(0, 0, IDS)
    down = rng.integers("crop y", below=9)
    right = rng.integers("crop x", below=9)
    assert set(down.tolist()) == set(right.tolist()) == set(range(9))
    for index, image in enumerate(PREPROCESS.normalize(pictures()).numpy()):
        padded = np.pad(image, ((0, 0), (4, 4), (4, 4)), mode="reflect")
        top, left = down[index], right[index]
        expected = padded[:, top : top + 16, left : left + 20]
        np.testing.assert_allclose(got[index].numpy(), expected, atol=1e-4)


def test_alternating_flip_shows_each_side_every_other_epoch() -> None:
    epochs = [run(Augmentation(flip="alternating"), epoch=epoch) for epoch in range(4)]
    assert torch.equal(epochs[0], epochs[2])
    assert torch.equal(epochs[1], epochs[3])
    assert torch.equal(epochs[0], epochs[1].flip(3))
    flipped = (epochs[0] != run(Augmentation())).flatten(1).any(1).float().mean()
    assert 0.4 < flipped < 0.6


def test_cutout_sets_one_square_a_sample_to_the_mean() -> None:
    white = torch.full((200, *SIZE, 3), 255, dtype=torch.uint8)
    hidden = (run(Augmentation(cutout=6), white) == 0).all(1)
    sides = hidden.any(2).sum(1), hidden.any(1).sum(1)
    assert torch.equal(hidden.sum((1, 2)), sides[0] * sides[1])  # a rectangle
    assert sides[0].max() == sides[1].max() == 6
    assert sides[0].min() >= 3  # the centre is inside
    assert hidden.flatten(1).float().mean(0).min() > 0  # everywhere
    smaller = run(Augmentation(cutout=6), white, size=(8, 10))
    assert (smaller == 0).all(1).any(2).sum(1).max() == 3


def mixed(augment: Augmentation) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = torch.arange(400)
    images, labels = PREPROCESS.normalize(pictures(400)), ids % 7
    params = sample(augment, ids)
    assert params.own_weight is not None
    assert params.mixed_boxes is not None
    out, targets = mix_batch(images, labels, params.own_weight, params.mixed_boxes, num_classes=7)
    return images, labels, out, targets


def test_mixup_blends_neighbours_and_targets_by_the_same_weight() -> None:
    images, labels, out, targets = mixed(Augmentation(mixup=0.8))
    for index in range(400):
        partner = index ^ 1
        weight = targets[index, labels[index]].item()
        assert targets[index, labels[partner]].item() == pytest.approx(1 - weight, abs=1e-6)
        expected = weight * images[index] + (1 - weight) * images[partner]
        torch.testing.assert_close(out[index], expected, atol=1e-3, rtol=0)
    weights = targets[torch.arange(400), labels]
    assert weights.std() > 0.2


def test_cutmix_weights_are_the_pixel_counts() -> None:
    images, labels, out, targets = mixed(Augmentation(cutmix=1.0))
    for index in range(400):
        own = (out[index] == images[index]).all(0)
        other = (out[index] == images[index ^ 1]).all(0)
        assert (own | other).all()
        assert targets[index, labels[index]].item() == pytest.approx(
            own.float().mean().item(), abs=1e-2
        )
        rows, columns = (~own).any(1).sum(), (~own).any(0).sum()
        assert (~own).sum() == rows * columns  # one box


@pytest.mark.parametrize("alpha", [0.4, 0.8, 1.0, 3.0])
def test_weights_follow_the_beta_distribution(alpha: float) -> None:
    from scipy.stats import beta, kstest

    values = sample_beta(StatelessRandom(0, 0, torch.arange(20_000)), "mixup", alpha).numpy()
    assert kstest(values, beta(alpha, alpha).cdf).pvalue > 1e-3


def test_each_sample_gets_mixup_or_cutmix() -> None:
    params = sample(Augmentation(mixup=0.5, cutmix=0.5))
    assert params.own_weight is not None
    assert params.mixed_boxes is not None
    is_blended = params.own_weight < 1
    has_box = (params.mixed_boxes != 0).any(dim=1)
    assert 60 < is_blended.sum() < 140
    assert has_box.sum() > 60
    assert not (is_blended & has_box).any()
