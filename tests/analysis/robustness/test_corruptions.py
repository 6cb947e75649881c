"""Fifteen corruptions that depend on the image alone and grow with severity."""

import threading
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from PIL import Image

from vit.analysis.robustness import corruptions as robustness
from vit.analysis.robustness.corruptions import CORRUPTIONS, SEVERITIES, corrupt_batch
from vit.prediction.predictor import Pixels

# CRC-32 of all severities of two pictures, as images were corrupted one by one; snow's since it is
# the same on every processor
FIRST_BYTES = {
    "gaussian_noise": (2175987519, 747574748),
    "shot_noise": (4229649336, 2067265959),
    "impulse_noise": (1308924068, 4186249270),
    "defocus_blur": (1691229747, 2944640665),
    "glass_blur": (4037144941, 3962596633),
    "motion_blur": (2846712883, 4272968907),
    "zoom_blur": (108811071, 2576578913),
    "snow": (228410302, 4056938968),
    "frost": (3952566491, 2831798682),
    "fog": (2644798157, 2694465123),
    "brightness": (2049653907, 1935258687),
    "contrast": (4038036193, 373267968),
    "elastic_transform": (1734954486, 1550249627),
    "pixelate": (1261637098, 3552970520),
    "jpeg_compression": (1900120238, 1403205415),
}


@pytest.fixture(scope="module", params=[32, 96])
def photo(request: pytest.FixtureRequest) -> Pixels:
    return draw_picture(request.param, request.param)


def draw_picture(height: int, width: int) -> Pixels:
    """With edges, texture and colour."""
    rng = np.random.default_rng(0)
    coarse = rng.integers(30, 226, (11, 11, 3), dtype=np.uint8)
    picture = np.asarray(
        Image.fromarray(coarse).resize((width, height), Image.Resampling.BILINEAR)
    ).copy()
    return np.clip(picture + rng.normal(0, 3, picture.shape), 0, 255).astype(np.uint8)


def corrupt(pixels: Pixels, *, name: str, severity: int, digest: int) -> Pixels:
    """One image [H, W, 3], as a batch of one."""
    corrupted = corrupt_batch(pixels[None], name=name, severity=severity, digests=[digest])
    return corrupted[0]


def test_there_are_the_fifteen_of_the_paper_at_five_severities() -> None:
    assert len(CORRUPTIONS) == 15
    assert all(len(each.small) == len(each.large) == 5 for each in CORRUPTIONS.values())


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_a_corruption_damages_more_with_severity_and_repeats(photo: Pixels, name: str) -> None:
    before = photo.copy()
    damage = []
    for severity in SEVERITIES:
        corrupted = corrupt(photo, name=name, severity=severity, digest=7)
        assert corrupted.shape == photo.shape
        assert corrupted.dtype == np.uint8
        assert np.array_equal(corrupted, corrupt(photo, name=name, severity=severity, digest=7))
        damage.append(np.abs(corrupted.astype(float) - photo).mean())
    assert np.array_equal(photo, before)
    assert damage[0] > 0.3
    assert damage[4] > damage[0]


def test_pixelate_keeps_most_pixels_of_a_small_image_at_its_lowest_severity() -> None:
    photo = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    corrupted = corrupt(photo, name="pixelate", severity=1, digest=0)
    # by hand: 30 of 32 rows and columns are kept in whole pixels, so at most two in each direction
    # change
    assert (corrupted == photo).all(axis=2).mean() >= (28 / 32) ** 2


@pytest.mark.parametrize(
    "name", ["gaussian_noise", "shot_noise", "motion_blur", "snow", "frost", "fog"]
)
def test_each_image_has_its_own_draw(photo: Pixels, name: str) -> None:
    one = corrupt(photo, name=name, severity=3, digest=1)
    assert not np.array_equal(one, corrupt(photo, name=name, severity=3, digest=2))


def test_noise_has_the_deviation_of_the_paper() -> None:
    grey = np.full((64, 64, 3), 128, dtype=np.uint8)
    gaussian = corrupt(grey, name="gaussian_noise", severity=5, digest=0) / 255
    assert gaussian.std() == pytest.approx(0.10, rel=0.05)
    shot = corrupt(grey, name="shot_noise", severity=5, digest=0) / 255
    assert shot.std() == pytest.approx(np.sqrt(0.5 / 50), rel=0.05)
    impulse = corrupt(grey, name="impulse_noise", severity=5, digest=0)
    assert (impulse != 128).any(axis=2).mean() == pytest.approx(0.07, abs=0.01)


def test_blur_keeps_the_mean_and_contrast_shrinks_towards_it(photo: Pixels) -> None:
    for name in ("defocus_blur", "motion_blur", "contrast"):
        corrupted = corrupt(photo, name=name, severity=3, digest=0)
        assert corrupted.mean() == pytest.approx(photo.mean(), abs=3)
        assert corrupted.std() < photo.std()


def test_brightness_raises_the_value_and_keeps_the_hue() -> None:
    colour = np.full((32, 32, 3), (60, 120, 30), dtype=np.uint8)
    brighter = corrupt(colour, name="brightness", severity=5, digest=0)[0, 0] / 255
    assert brighter.max() == pytest.approx(120 / 255 + 0.3, abs=0.005)
    assert brighter / brighter.max() == pytest.approx(np.array([0.5, 1, 0.25]), abs=0.01)


def test_no_state_is_kept_between_calls(photo: Pixels) -> None:
    alone = corrupt(photo, name="glass_blur", severity=2, digest=5)
    for name in CORRUPTIONS:
        corrupt(photo, name=name, severity=1, digest=9)
    assert np.array_equal(alone, corrupt(photo, name="glass_blur", severity=2, digest=5))


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_corrupted_images_have_the_bytes_of_the_first_version(name: str) -> None:
    for (height, width), expected in zip([(32, 32), (72, 96)], FIRST_BYTES[name], strict=True):
        picture = draw_picture(height, width)
        corrupted = [
            corrupt(picture, name=name, severity=severity, digest=7) for severity in SEVERITIES
        ]
        assert zlib.crc32(np.stack(corrupted).tobytes()) == expected


@pytest.mark.parametrize("name", ["motion_blur", "defocus_blur", "snow"])
def test_the_last_bits_of_a_filter_change_no_byte(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processors with and without AVX-512 round Fourier transforms and exponentials differently."""
    picture = draw_picture(72, 96)

    def corrupt_all() -> Pixels:
        return np.stack(
            [corrupt(picture, name=name, severity=severity, digest=7) for severity in SEVERITIES]
        )

    expected = corrupt_all()
    exact_filter = robustness._filter
    rng = np.random.default_rng(0)
    monkeypatch.setattr(
        robustness,
        "_filter",
        lambda *args: (filtered := exact_filter(*args)) + rng.normal(0, 3e-16, filtered.shape),
    )
    assert np.array_equal(corrupt_all(), expected)


@pytest.mark.parametrize("name", CORRUPTIONS)
def test_an_image_is_corrupted_alike_in_any_batch_and_thread(name: str) -> None:
    batch = np.random.default_rng(0).integers(0, 256, (20, 32, 32, 3), dtype=np.uint8)
    digests, meeting = list(range(2**63, 2**63 + 20)), threading.Barrier(2)

    def run(severity: int) -> Pixels:
        meeting.wait()
        return corrupt_batch(batch, name=name, severity=severity, digests=digests)

    with ThreadPoolExecutor(2) as pool:
        of_threads = list(pool.map(run, (4, 4)))
    alone = [
        corrupt(image, name=name, severity=4, digest=of)
        for image, of in zip(batch, digests, strict=True)
    ]
    assert all(np.array_equal(found, np.stack(alone)) for found in of_threads)
