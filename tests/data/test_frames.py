"""Frames of one scene stay together, whatever their names are, and unrelated photos don't."""

import numpy as np
from PIL import Image, ImageDraw, ImageEnhance, ImageOps

from vit.data.dataset import ImageRule
from vit.data.duplicates import find_duplicates, hash_image
from vit.data.groups import join_duplicates
from vit.data.mirrors import find_mirrored_classes
from vit.data.open import open_passed

NUM_SCENES, NUM_FRAMES = 30, 6


def draw_scene(rng: np.random.Generator) -> Image.Image:
    layers = [
        np.asarray(
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize(
                (320, 320), Image.Resampling.BICUBIC
            ),
            np.float64,
        )
        for side in (6, 20, 60)
    ]
    return Image.fromarray((sum(layers) / 3).astype(np.uint8))


def pan(scene: Image.Image) -> list[Image.Image]:
    """A window that moves by a fifth of its width: the ends show different parts."""
    tops = (20 + 3 * frame for frame in range(NUM_FRAMES))
    return [scene.crop((32 * k, top, 32 * k + 160, top + 160)) for k, top in enumerate(tops)]


def test_frames_stay_together_and_are_seen_in_training() -> None:
    rng = np.random.default_rng(0)
    images = [frame for _ in range(NUM_SCENES) for frame in pan(draw_scene(rng))]
    scenes = np.repeat(np.arange(NUM_SCENES), NUM_FRAMES)
    # classes by chance, and in no order
    labels = scenes % 3
    order = rng.permutation(len(images))
    hashes = np.array([hash_image(images[index]) for index in order], np.uint64).T
    ids = [f"{number:04}.jpg" for number in range(len(order))]
    joined = join_duplicates(ids, labels[order], hashes, num_splits=3)
    assert (joined.num_frames, joined.num_scenes) == (len(images), NUM_SCENES)
    assert len(set(zip(joined.groups, scenes[order], strict=True))) == NUM_SCENES

    # a given split: all but one of the frames of half of the scenes
    is_test = (np.arange(len(images)) % NUM_FRAMES == 2)[order]
    is_known = ~is_test & (scenes < NUM_SCENES // 2)[order]
    _, near = find_duplicates(hashes[:, is_test], hashes[:, is_known], labels[order][is_test])
    seen = scenes[order][is_test][near[:, 0]]
    assert sorted(seen) == list(range(NUM_SCENES // 2))
    assert (seen == scenes[order][is_known][near[:, 1]]).all()


def test_unrelated_images_are_no_frames() -> None:
    rng = np.random.default_rng(1)
    labels = np.arange(120) % 2
    # of one class all show the same part, in another light
    part = draw_scene(rng).crop((0, 0, 160, 160))
    images = [
        ImageEnhance.Brightness(part).enhance(rng.uniform(0.8, 1.2))
        if label
        else draw_scene(rng).crop((0, 0, 160, 160))
        for label in labels
    ]
    hashes = np.array([hash_image(image) for image in images], np.uint64).T
    hashes[1] = 0
    joined = join_duplicates([f"{n}.jpg" for n in range(120)], labels, hashes, num_splits=3)
    assert (joined.num_frames, len(set(joined.groups))) == (0, 120)


def draw_arrow(rng: np.random.Generator) -> Image.Image:
    ground = Image.fromarray(rng.integers(60, 200, (4, 4, 3), dtype=np.uint8)).resize((96, 96))
    x, y = rng.integers(36, 60, 2).tolist()
    points = [(-30, -7), (5, -7), (5, -20), (32, 0), (5, 20), (5, 7), (-30, 7)]
    colour = tuple(rng.integers(0, 256, 3).tolist())
    ImageDraw.Draw(ground).polygon([(x + a, y + b) for a, b in points], fill=colour)
    return ground


def test_arrows_are_mirror_images_and_scenes_are_not() -> None:
    rng = np.random.default_rng(2)
    arrows = [(draw_arrow(rng), "right") for _ in range(40)]
    arrows += [(ImageOps.mirror(draw_arrow(rng)), "left") for _ in range(40)]
    rule = ImageRule(test_fraction=0.0)
    found = find_mirrored_classes(open_passed(arrows, rule=rule).split("train"))
    assert sorted(found or ()) == ["left", "right"]
    # of each label some scenes, and arrows of both directions
    either = [(image, "ab"[place % 2]) for place, (image, _) in enumerate(arrows)]
    scenes = [(image, "ab"[n % 2]) for n in range(10) for image in pan(draw_scene(rng))]
    for images in (either, scenes):
        assert find_mirrored_classes(open_passed(images, rule=rule).split("train")) is None
