"""Duplicates are found, exactly by pixels and nearly by perceptual hashes; flat and unrelated
images are not."""

import io

import numpy as np
from PIL import Image, ImageOps

from vit.data.duplicates import compute_dhash, find_duplicates, hash_pixels


def picture(seed: int, size: int = 32) -> Image.Image:
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (6, 6, 3), dtype=np.uint8))
    smooth = np.asarray(coarse.resize((size, size), Image.Resampling.BICUBIC)).astype(int)
    return Image.fromarray(
        np.clip(smooth + random.integers(-9, 10, smooth.shape), 0, 255).astype(np.uint8)
    )


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
    exact, near = find_duplicates(hashes(queries), hashes(training))
    assert exact.tolist() == [[7, 123]]
    assert near.tolist() == [[8, 45], [9, 200]]


def test_mirror_images_are_found() -> None:
    training = [picture(seed) for seed in range(300)]
    queries = [ImageOps.mirror(training[seed]) for seed in range(40)]
    queries += [recode(ImageOps.mirror(training[seed]), 60) for seed in range(40, 80)]
    exact, near = find_duplicates(hashes(queries), hashes(training))
    assert len(exact) == 0
    assert near.tolist() == [[number, number] for number in range(80)]


def test_flat_pictures_are_no_lookalikes() -> None:
    flat = [Image.new("RGB", (32, 32), (level, level, level)) for level in range(0, 250, 10)]
    shades = [Image.fromarray(np.full((32, 32, 3), 7, np.uint8))]
    exact, near = find_duplicates(hashes(shades), hashes(flat))
    assert len(exact) == len(near) == 0
    assert find_duplicates(hashes(flat[:2]), hashes(flat))[0].tolist() == [[0, 0], [1, 1]]


def test_moderate_crops_are_found() -> None:
    training = [picture(seed, size=200) for seed in range(100)]
    # 5 % of width and height
    queries = [image.crop((5, 5, 195, 195)) for image in training]
    _, near = find_duplicates(hashes(queries), hashes(training))
    assert len(near) >= 80
    assert (near[:, 0] == near[:, 1]).all()
