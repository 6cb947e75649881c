"""Frames of one scene stay together and are counted where they can't; mirrored classes are found."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageOps

from vit.data.dataset import ImageRule
from vit.data.frames import find_frames, shrink
from vit.data.mirrors import find_mirrored_classes
from vit.data.open import open_for_model, open_passed
from vit.data.splits import DatasetSplits

NUM_SCENES, NUM_FRAMES = 30, 6


def draw_scene(rng: np.random.Generator) -> Image.Image:
    layers = [
        Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).resize((320, 320))
        for side in (6, 20, 60)
    ]
    return Image.fromarray(np.mean(layers, axis=0).astype(np.uint8))


def pan(scene: Image.Image) -> list[Image.Image]:
    """A window that moves by a sixth of its width: the ends show different parts."""
    return [scene.crop((27 * k, 3 * k, 27 * k + 160, 3 * k + 160)) for k in range(NUM_FRAMES)]


def open_scenes(root: Path, place: Callable[[int, int], str]) -> tuple[DatasetSplits, list[int]]:
    """Save frames under names in random order, at the place of (scene, frame), and open them as
    those of a model's training. Return them and the scene of each number in the names."""
    rng = np.random.default_rng(0)
    order = rng.permutation(NUM_SCENES * NUM_FRAMES)
    numbers = iter(order.tolist())
    for scene in range(NUM_SCENES):
        for number, frame in enumerate(pan(draw_scene(rng))):
            folder = root / place(scene, number)
            folder.mkdir(parents=True, exist_ok=True)
            frame.save(folder / f"{next(numbers)}.png")
    facts = {"name": "folder", "root": str(root), "group_duplicates": True, "num_trained_on": 1}
    return open_for_model(None, recorded=facts), (np.argsort(order) // NUM_FRAMES).tolist()


def test_a_scene_is_on_one_side_and_the_plan_counts_them(tmp_path: Path) -> None:
    splits, scene_of = open_scenes(tmp_path, lambda scene, _: "ab"[scene % 7 % 2])
    sides = [
        {scene_of[int(Path(name).stem)] for name in splits.split(split).ids}
        for split in ("train", "validation", "test")
    ]
    assert sum(map(len, sides)) == len(set().union(*sides)) == NUM_SCENES
    assert any("180 images" in text and "30 scenes" in text for text in splits.describe_splits())


def test_frames_of_given_splits_are_in_groups_of_the_training(tmp_path: Path) -> None:
    def place(scene: int, frame: int) -> str:
        split = "test" if frame == 2 or scene < 10 else "train"
        return f"{split}/{'ab'[scene % 2]}"

    splits, scene_of = open_scenes(tmp_path, place)
    splits = splits.join_copies()
    test = splits.split("test")
    seen = [
        scene_of[int(Path(name).stem)]
        for name, group in zip(test.ids, test.groups or (), strict=True)
        if group in splits.training_groups
    ]
    assert sorted(seen) == list(range(10, NUM_SCENES))


def draw_arrow(rng: np.random.Generator) -> Image.Image:
    ground = Image.fromarray(rng.integers(60, 200, (4, 4, 3), dtype=np.uint8)).resize((96, 96))
    x, y = rng.integers(36, 60, 2).tolist()
    points = [(-30, -7), (5, -7), (5, -20), (32, 0), (5, 20), (5, 7), (-30, 7)]
    colour = tuple(rng.integers(0, 256, 3).tolist())
    ImageDraw.Draw(ground).polygon([(x + a, y + b) for a, b in points], fill=colour)
    return ground


def test_arrows_are_mirror_images_and_scenes_are_neither_that_nor_frames() -> None:
    rng = np.random.default_rng(2)
    arrows = [(draw_arrow(rng), "right") for _ in range(60)]
    arrows += [(ImageOps.mirror(draw_arrow(rng)), "left") for _ in range(60)]
    rule = ImageRule(test_fraction=0.0)
    found = find_mirrored_classes(open_passed(arrows, rule=rule).split("train"))
    assert sorted(found or ()) == ["left", "right"]
    scenes = [(draw_scene(rng), "ab"[number % 2]) for number in range(80)]
    assert find_mirrored_classes(open_passed(scenes, rule=rule).split("train")) is None
    assert not len(find_frames(np.stack([shrink(scene) for scene, _ in scenes])))
