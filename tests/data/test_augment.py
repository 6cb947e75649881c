"""Every sample gets its own fresh draw, and gets what one would do to it alone with those
parameters."""

import numpy as np
import pytest
import torch
from torch import Tensor

from vit.data.augment import (
    Augmentation,
    AugmentParams,
    color_and_normalize,
    mix_batch,
    sample_beta,
)
from vit.data.crop import Crop, crop_and_flip
from vit.data.preprocess import Preprocess
from vit.data.random import StatelessRandom

SIZE = (16, 20)
PREPROCESS = Preprocess(SIZE, mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
IDS = torch.arange(200)


def pictures(count: int = 200, size: tuple[int, int] = SIZE) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(0, 256, (count, *size, 3), dtype=torch.uint8, generator=generator)


def sample(
    augment: Augmentation,
    ids: Tensor,
    *,
    epoch: int = 0,
    stored_size: tuple[int, int] = SIZE,
    size: tuple[int, int] = SIZE,
) -> AugmentParams:
    return augment.sample(
        StatelessRandom(0, epoch, ids),
        stored_size=stored_size,
        size=size,
        full_height=SIZE[0],
        mix=True,
    )


def cut(
    augment: Augmentation,
    epoch: int = 0,
    ids: Tensor = IDS,
    images: Tensor | None = None,
    size: tuple[int, int] = SIZE,
) -> Tensor:
    images = pictures() if images is None else images
    params = sample(augment, ids, epoch=epoch, stored_size=(images.shape[1], images.shape[2]))
    return crop_and_flip(images, ids, params.crop, size=size)


def finish(
    augment: Augmentation, pixels: Tensor, epoch: int = 0, size: tuple[int, int] = SIZE
) -> Tensor:
    params = sample(augment, torch.arange(len(pixels)), epoch=epoch, size=size)
    return color_and_normalize(pixels, params, preprocess=PREPROCESS, size=size)


def test_crop_with_padding_is_a_shift_of_the_reflected_image_by_each_samples_own_draw() -> None:
    got, padding, rng = cut(Augmentation(crop=Crop(padding=4))), 4, StatelessRandom(0, 0, IDS)
    down = rng.integers("crop y", below=9)
    right = rng.integers("crop x", below=9)
    assert set(down.tolist()) == set(right.tolist()) == set(range(9))
    for index, image in enumerate(pictures().numpy()):
        padded = np.pad(image, ((padding, padding), (padding, padding), (0, 0)), mode="reflect")
        top, left = down[index], right[index]
        np.testing.assert_array_equal(got[index].numpy(), padded[top : top + 16, left : left + 20])


def test_alternating_flip_shows_each_side_every_other_epoch() -> None:
    epochs = [cut(Augmentation(crop=Crop(flip="alternating")), epoch) for epoch in range(4)]
    assert torch.equal(epochs[0], epochs[2])
    assert torch.equal(epochs[1], epochs[3])
    assert torch.equal(epochs[0], epochs[1].flip(2))
    flipped = (epochs[0] != pictures()).flatten(1).any(1).float().mean()
    assert 0.4 < flipped < 0.6


def test_cutout_sets_one_square_a_sample_to_the_mean() -> None:
    images = finish(Augmentation(cutout=6), torch.full((200, *SIZE, 3), 255, dtype=torch.uint8))
    hidden = (images == 0).all(1)
    sides = hidden.any(2).sum(1), hidden.any(1).sum(1)
    assert torch.equal(hidden.sum((1, 2)), sides[0] * sides[1])  # a rectangle
    assert sides[0].max() == sides[1].max() == 6
    assert sides[0].min() >= 3  # the centre is inside
    assert hidden.flatten(1).float().mean(0).min() > 0  # everywhere
    smaller = finish(
        Augmentation(cutout=6), torch.full((200, *SIZE, 3), 255, dtype=torch.uint8), size=(8, 10)
    )
    assert (smaller == 0).all(1).any(2).sum(1).max() == 3


def mixed(
    augment: Augmentation, count: int = 400, epoch: int = 0
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = torch.arange(count)
    images = PREPROCESS.normalize(pictures(count))
    labels = ids % 7
    params = sample(augment, ids, epoch=epoch)
    out, targets = mix_batch(images, labels, params.mix, num_classes=7)
    return images, labels, out, targets


def test_mixup_blends_neighbours_and_targets_by_the_same_weight() -> None:
    images, labels, out, targets = mixed(Augmentation(mixup=0.8))
    for index in range(400):
        partner = index ^ 1
        weight = targets[index, labels[index]].item()
        assert targets[index, labels[partner]].item() == pytest.approx(1 - weight, abs=1e-6)
        expected = weight * images[index] + (1 - weight) * images[partner]
        torch.testing.assert_close(out[index], expected, atol=1e-5, rtol=0)
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
