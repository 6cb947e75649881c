"""Duplicates are found, exactly by pixels and nearly by perceptual hashes; flat and unrelated images are not."""

import io
import time

import numpy as np
import pytest
from PIL import Image

from vit.data.duplicates import _close_pairs, compute_dhash, find_duplicates, hash_pixels, jpeg_note


def picture(seed: int, size: int = 32) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray(np.clip(smooth + random.integers(-9, 10, smooth.shape), 0, 255).astype(np.uint8))


def recode(image: Image.Image, quality: int) -> Image.Image:
    buffer = io.BytesIO()
    image.save(buffer, "JPEG", quality=quality)
    return Image.open(buffer).convert("RGB")


def hashes(images: list[Image.Image]) -> tuple[np.ndarray, np.ndarray]:
    return (
        np.array([hash_pixels(image) for image in images], dtype=np.uint64),
        np.array([compute_dhash(image) for image in images], dtype=np.uint64),
    )


def test_pixel_hash_tells_every_change_and_the_shape() -> None:
    image = picture(0)
    pixels = np.array(image)
    pixels[31, 31, 2] ^= 1
    assert hash_pixels(image) == hash_pixels(image.copy())
    assert hash_pixels(image) != hash_pixels(Image.fromarray(pixels))
    assert hash_pixels(Image.new("RGB", (4, 2))) != hash_pixels(Image.new("RGB", (2, 4)))


def test_planted_duplicates_are_found_and_nothing_else() -> None:
    training = [picture(seed) for seed in range(300)]
    queries = [picture(1000 + seed) for seed in range(50)]
    queries[7] = training[123].copy()
    queries[8] = recode(training[45], 60)
    queries[9] = training[200].resize((40, 40), Image.Resampling.BICUBIC)
    found = find_duplicates(hashes(queries), hashes(training))
    assert found.exact.tolist() == [[7, 123]]
    assert found.near.tolist() == [[8, 45], [9, 200]]
    assert (found.near_distance <= 4).all()


def test_flat_pictures_are_no_lookalikes() -> None:
    flat = [Image.new("RGB", (32, 32), (level, level, level)) for level in range(0, 250, 10)]
    shades = [Image.fromarray(np.full((32, 32, 3), 7, np.uint8))]
    found = find_duplicates(hashes(shades), hashes(flat))
    assert len(found.exact) == len(found.near) == 0
    assert find_duplicates(hashes(flat[:2]), hashes(flat)).exact.tolist() == [[0, 0], [1, 1]]


# larger sets are searched by more bands
@pytest.mark.parametrize(
    ("distance", "count"), [(0, 400), (1, 400), (4, 400), (7, 400), (4, 9000), (7, 9000), (7, 20_000)]
)
def test_banded_search_finds_what_comparing_all_finds(distance: int, count: int) -> None:
    random = np.random.default_rng(0)
    training = random.integers(0, 2**63, count, dtype=np.uint64)
    queries = training[random.integers(0, count, 150)].copy()
    for query in range(150):  # flip up to nine bits
        for bit in random.integers(0, 64, random.integers(0, 10)):
            queries[query] ^= np.uint64(1 << int(bit))
    pairs = {
        (int(q), int(t)) for qs, ts, _ in _close_pairs(queries, training, distance) for q, t in zip(qs, ts, strict=True)
    }
    every = np.bitwise_count(queries[:, None] ^ training[None]) <= distance
    assert pairs == {(int(q), int(t)) for q, t in np.argwhere(every)}


def test_empty_sets_have_no_duplicates() -> None:
    none = (np.zeros(0, np.uint64), np.zeros(0, np.uint64))
    some = hashes([picture(0)])
    for left, right in ((none, some), (some, none)):
        found = find_duplicates(left, right)
        assert found.exact.shape == found.near.shape == (0, 2)


def test_ten_thousand_against_fifty_thousand_takes_seconds() -> None:
    random = np.random.default_rng(0)
    training = random.integers(0, 2**63, (2, 50_000), dtype=np.uint64)
    queries = random.integers(0, 2**63, (2, 10_000), dtype=np.uint64)
    queries[:, :100] = training[:, :100]
    start = time.perf_counter()
    found = find_duplicates((queries[0], queries[1]), (training[0], training[1]))
    assert time.perf_counter() - start < 10
    assert len(found.exact) == 100


def shrunken_photographs() -> list[Image.Image]:
    """Detailed 32×32 pictures that were never encoded: texture over shapes, scaled down from 256."""
    images = []
    for seed in range(60):
        random = np.random.default_rng(seed)
        texture = random.normal(0, 60, (256, 256, 3)).cumsum(0).cumsum(1)
        texture = (texture - texture.min()) / np.ptp(texture) * 255
        fine = np.clip(texture + random.normal(0, 40, texture.shape), 0, 255).astype(np.uint8)
        images.append(Image.fromarray(fine).resize((32, 32), Image.Resampling.BOX))
    return images


def test_the_jpeg_copy_of_cifar10_is_told_from_unencoded_pixels() -> None:
    names = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
    images = shrunken_photographs()
    assert jpeg_note(names, images) is None
    for quality in (50, 75, 90):
        note = jpeg_note(names, [recode(image, quality) for image in images])
        assert note is not None
        assert note.startswith("CIFAR-10 (JPEG copy)")
    note = jpeg_note(("a", "b"), [recode(image, 75) for image in images])
    assert note is not None
    assert "CIFAR" not in note
    assert jpeg_note(names, [recode(image, 75).resize((48, 48)) for image in images]) is None
    assert jpeg_note(names, []) is None
