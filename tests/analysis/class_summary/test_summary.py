"""A summary finds a planted mark, and its numbers are those of real forward passes."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from tests.analysis.class_summary import planted
from tests.conftest import BuildOnce, Launcher
from tests.explanation.keep_tokens import keep_tokens
from vit.analysis.class_summary.clusters import measure_overlap
from vit.analysis.class_summary.images import (
    SummaryImages,
    _sample,
    find_mask,
    find_masks,
    is_inside,
    read_summary_images,
)
from vit.analysis.class_summary.page import build_summary_page
from vit.analysis.class_summary.passes import Passes, has_class
from vit.analysis.class_summary.places import Pictures, find_regions, measure_region, shift_maps
from vit.analysis.class_summary.shortcuts import _move_at_random, measure_removal
from vit.analysis.class_summary.summarize import summarize_images
from vit.bundle import Bundle

SIZE = 8


@pytest.fixture(scope="session")
def bundle(build_once: BuildOnce) -> Bundle:
    """A model of images of which some of one class have a mark; three seconds of training."""

    def build(folder: Path) -> None:
        folder.mkdir()
        trained = planted.train(planted.plant(size=SIZE, seed=0, test=False), seed=0)
        torch.save(trained, folder / "bundle.pt")

    file = build_once("shortcuts", build) / "bundle.pt"
    loaded: Bundle = torch.load(file, weights_only=False)
    return loaded


@pytest.mark.extended
def test_a_planted_mark_is_flagged_and_nothing_else(bundle: Bundle) -> None:
    images = planted.plant(size=SIZE, seed=1000, test=True)
    summary = planted.summarize(bundle, images, seed=0)
    assert {name for name, _ in summary.flagged} == {"digit 0"}
    for _, cluster in summary.flagged:
        assert planted.is_mark(cluster.strip, size=SIZE)
        assert "at the same place off the centre" in cluster.suspicions
        assert cluster.removal.fall > cluster.removal.random_fall
        assert cluster.images == pytest.approx(planted.MARKED_SHARE, abs=0.12)


@pytest.mark.extended
def test_without_a_mark_nothing_is_flagged() -> None:
    bundle = planted.train(planted.plant(size=0, seed=0, test=False), seed=0)
    images = planted.plant(size=0, seed=1000, test=True)
    summary = planted.summarize(bundle, images, seed=0)
    assert summary.flagged == []
    # digits stand about the middle
    for row in summary.classes:
        assert row.centre.share > row.centre.null_high
        assert row.border.share < row.border.null
        assert np.mean(row.mean_map) == pytest.approx(1, abs=1e-5)
        assert sum(cluster.evidence for cluster in row.clusters) <= 1


@pytest.mark.parametrize("task", ["classes", "multilabel"])
def test_what_leaving_out_does_is_what_forward_passes_say(bundle: Bundle, task: str) -> None:
    """The mark of the images that have it, 2 × 2 patches, left out by hand."""
    bundle = replace(bundle, data={"task": task})

    def find_probabilities(logits: torch.Tensor) -> torch.Tensor:
        return (logits.sigmoid() if task == "multilabel" else logits.softmax(dim=1))[0]

    def is_predicted(probabilities: torch.Tensor) -> bool:
        if task == "multilabel":
            return float(probabilities[planted.MARKED_CLASS]) >= 0.5
        return int(probabilities.argmax()) == planted.MARKED_CLASS

    images = planted.plant(size=SIZE, seed=1000, test=True)
    marked = np.flatnonzero(images.is_marked)[:12]
    passes = Passes(bundle, images.pixels, method="libra-removal", batch_size=5)
    marked = marked[has_class(passes.predicted[marked], planted.MARKED_CLASS)]
    grid = np.zeros(passes.grid, dtype=bool)
    grid[-2:, :2] = True
    members = np.tile(grid.ravel(), (len(marked), 1))
    # one image has more of them than others do
    members[0, 0] = True

    random = np.random.default_rng(0)
    removal = measure_removal(members, marked, planted.MARKED_CLASS, passes, random)

    inputs = bundle.preprocess.normalize(torch.from_numpy(images.pixels[marked]))
    falls = []
    flips = 0
    with torch.no_grad():
        for image, row in zip(inputs, members, strict=True):
            kept = torch.from_numpy(np.flatnonzero(~row))[None]
            whole = find_probabilities(bundle.model(image[None]))
            with keep_tokens(bundle.model, kept):
                without = find_probabilities(bundle.model(image[None]))
            falls.append(float(whole[0] - without[0]))
            flips += not is_predicted(without)
    assert removal is not None
    assert removal.num_images == len(marked)
    assert removal.flips == flips
    assert removal.fall == pytest.approx(np.mean(falls), abs=1e-5)


def test_a_cluster_is_compared_with_copies_of_its_shape() -> None:
    """The class falls without any two neighbours. So no pair matters more than another pair, though
    scattered patches would hardly ever matter."""
    grid = (4, 4)

    def leave_out(indices: np.ndarray, removed: np.ndarray) -> torch.Tensor:
        masks = removed.reshape(-1, *grid)
        # around the edges, as copies are moved
        pairs = [masks & np.roll(masks, 1, axis) for axis in (1, 2)]
        falls = np.logical_or(*pairs).any(axis=(1, 2))
        logits = torch.zeros(len(removed), 2)
        logits[:, 0] = torch.from_numpy(np.where(falls, -2.0, 2.0))
        return logits

    members = np.zeros((40, 16), dtype=bool)
    members[:, [5, 6]] = True
    passes = SimpleNamespace(
        predicted=np.zeros(40, dtype=int),
        grid=grid,
        leave_out=leave_out,
        decide=lambda logits: logits.numpy().argmax(axis=1),
        compute_log_odds=lambda logits, _: logits[:, 0] - logits[:, 1],
    )
    random = np.random.default_rng(0)
    removal = measure_removal(members, np.arange(40), 0, passes, random)
    assert removal is not None
    # 40 of 40 predictions change, with each kind of removal; no image has the larger fall
    assert (removal.flips, removal.random_flips) == (40, 40)
    assert (removal.log_odds, removal.p_value) == (0, 1)
    moved = {tuple(np.flatnonzero(_move_at_random(members[0], grid, random))) for _ in range(400)}
    # every pair of neighbours but this one: 16 across and 16 down
    assert len(moved) == 31
    assert (5, 6) not in moved


def test_a_mark_is_found_in_a_cluster_that_joins_it_with_the_object() -> None:
    """The model sees the mark, and patches of the object, alike."""
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (20, 24, 24, 3), dtype=np.uint8)
    indices = np.arange(20)
    members = np.zeros((20, 36), dtype=bool)
    # one of the four patches in the middle
    members[indices, random.choice([14, 15, 20, 21], 20)] = True
    pictures = Pictures(pixels, (6, 6), random)
    assert pictures.find_place(indices, members) is None

    # the mark, two patches, the second of them in another cluster
    members[:6, 30] = True
    assert pictures.find_place(indices, members) is None
    pixels[:6, 20:, :8] = pixels[0, 20:, :8]
    assert measure_overlap(members) < 0.5
    assert pictures.find_place(indices, members) == 30
    assigned = np.where(members, 0, -1)
    assigned[:6, 31] = 1
    held_out = assigned[:4].copy()
    assert pictures.separate_marks(indices, assigned, [held_out], num_clusters=2) == 1
    mark = np.zeros((20, 36), dtype=bool)
    mark[:6, 30:32] = True
    assert ((assigned == 2) == mark).all()
    assert ((held_out == 2) == mark[:4]).all()
    # the object is where it was
    assert (assigned == 0).sum(axis=1).tolist() == [1] * 20

    # too few images to test
    members[4:6, 30] = False
    assert pictures.find_place(indices, members) is None


def test_regions_and_overlaps_by_hand() -> None:
    border, centre = find_regions((8, 8))
    assert border.sum() == 28
    assert centre.sum() == 16
    members = np.array([[1, 1, 0, 0], [1, 0, 0, 0], [1, 1, 0, 0]], dtype=bool)
    assert measure_overlap(members) == pytest.approx((0.5 + 1 + 0.5) / 3)
    assert measure_overlap(members[:1]) == 0

    maps = np.zeros((40, 8, 8))
    maps[:, 0, 0] = 1
    random = np.random.default_rng(0)
    corner = measure_region(maps, border, random)
    assert corner.share == pytest.approx(1)
    # of a map that is moved, wherever it goes
    assert corner.null == pytest.approx(28 / 64)
    assert corner.null_low < 28 / 64 < corner.null_high < 0.7
    assert shift_maps(maps, random).sum(axis=(1, 2)) == pytest.approx(1)


def test_masks_say_what_lies_inside(bundle: Bundle) -> None:
    images = planted.plant(size=0, seed=1000, test=True)
    pixels = images.pixels[:60]
    labels = images.labels[:60]
    masks = np.zeros(pixels.shape[:3], np.float32)
    masks[:, 4:28, 4:28] = 1
    masks[0] = np.nan
    paths = [str(n) for n in range(len(labels))]
    summary = summarize_images(
        bundle,
        SummaryImages(pixels, labels, paths, masks),
        method="libra-removal",
        batch_size=64,
    )
    for row in summary.classes:
        assert row.masks is not None
        assert row.masks.area == pytest.approx(36 / 64)
        # all masks are the same, so the mean map has the share
        if row.masks.num_images == row.num_images:
            inside = np.array(row.mean_map)[1:7, 1:7].sum() / 64
            assert row.masks.inside == pytest.approx(inside, abs=1e-5)
    num_masks = sum(row.masks.num_images for row in summary.classes if row.masks)
    assert num_masks == len(labels) - 1


@pytest.mark.extended
def test_the_command_writes_a_page_and_a_file(
    tiny_run: Path, tmp_path: Path, cli: Launcher
) -> None:
    output = tmp_path / "summary"
    printed = cli.succeed("attention", tiny_run, "--summary", "--output", output).out
    assert "10 classes by libra-removal, 0 suspicious clusters tested" in printed
    content: dict[str, Any] = json.loads((output / "summary.json").read_text())
    assert [row["name"] for row in content["classes"]] == [str(digit) for digit in range(10)]
    assert content["has_labels"]
    page = (output / "summary.html").read_text()
    assert page.count("<section") == 10
    assert "http" not in page.replace("http-equiv", "")
    assert cli.fail("attention", tiny_run, "--masks", tmp_path, "--output", tmp_path / "other")


def test_labels_and_masks_are_found_by_names(tiny_bundle: Bundle, tmp_path: Path) -> None:
    names = tiny_bundle.class_names
    random = np.random.default_rng(0)
    for name in names[:2]:
        for folder in (tmp_path / "photos" / name, tmp_path / "masks" / name):
            folder.mkdir(parents=True)
        for number in range(8):
            pixels = random.integers(0, 256, (12, 16, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
            mask = np.zeros((12, 16), np.uint8)
            mask[:, :8] = 1
            Image.fromarray(mask).save(tmp_path / "masks" / name / f"{number}.png")
    result = vit.summarize_classes(tiny_bundle, tmp_path / "photos", masks=tmp_path / "masks")
    assert [row.name for row in result.summary.classes] == list(names[:2])
    for row in result.summary.classes:
        assert row.masks is not None
        assert row.masks.area == pytest.approx(0.5, abs=0.01)
    Image.new("L", (3, 3)).save(tmp_path / "masks" / names[0] / "0.png")
    with pytest.raises(ValueError, match="a mask covers its image"):
        vit.summarize_classes(tiny_bundle, tmp_path / "photos", masks=tmp_path / "masks")


def test_a_label_is_summarised_over_the_images_that_have_it(tiny_bundle: Bundle) -> None:
    model = replace(tiny_bundle, data={"task": "multilabel"})
    height, width = model.preprocess.image_size
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (24, height, width, 3), dtype=np.uint8)
    labels = np.zeros((24, len(model.class_names)), dtype=bool)
    labels[:16, 0] = labels[8:, 1] = labels[:3, 2] = True
    images = SummaryImages(pixels, labels, [str(number) for number in range(24)])
    summary = summarize_images(model, images, method="libra-removal")
    assert [(row.name, row.num_images) for row in summary.classes] == [
        (name, 16) for name in model.class_names[:2]
    ]
    assert summary.left_out == [model.class_names[2]]
    with torch.no_grad():
        logits = model.model(model.preprocess.normalize(torch.from_numpy(pixels)))
    for place, row in enumerate(summary.classes):
        found = (logits[labels[:, place], place] >= 0).double().mean()
        assert row.recall == pytest.approx(float(found))
    assert "each label by" in build_summary_page(summary)
    chosen = _sample(labels, 24, max_images=6)
    assert labels[chosen].sum(axis=0)[:3].min() >= 2


def test_folders_of_wordnet_ids_are_the_labels_of_a_model_of_their_words(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    for number, folder in enumerate(("n02102040", "n01440764", "n01440764")):
        (tmp_path / folder).mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), "white").save(tmp_path / folder / f"{number}.png")
    for names, labels in (
        (("tench, Tinca tinca", "English springer", "church"), [0, 0, 1]),
        (("n02102040", "n01440764"), [1, 1, 0]),
        (("tench", "church"), None),
    ):
        bundle = replace(tiny_bundle, class_names=names)
        classes = read_summary_images(bundle, tmp_path, None).classes
        assert (None if classes is None else classes.tolist()) == labels


def test_the_mask_of_one_of_two_images_of_a_name_describes_neither(
    tiny_bundle: Bundle, tmp_path: Path
) -> None:
    photos = [tmp_path / name / "0.png" for name in ("a", "b")]
    for path in (*photos, tmp_path / "masks" / "0.png"):
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (8, 8), "white").save(path)
    with pytest.raises(ValueError, match=r"no mask in .* has the name of an image"):
        read_summary_images(tiny_bundle, photos, tmp_path / "masks")
    masks = read_summary_images(tiny_bundle, photos[:1], tmp_path / "masks").masks
    assert masks is not None
    assert masks.min() == 1


def test_masks_of_a_coco_file_are_polygons_or_boxes(tmp_path: Path) -> None:
    content = {
        "images": [
            {"id": 7, "file_name": "a/1.jpg", "width": 10, "height": 8},
            {"id": 8, "file_name": "b/1.jpg", "width": 10, "height": 8},
            {"id": 9, "file_name": "b/2.jpg", "width": 10, "height": 8},
        ],
        "annotations": [
            {"image_id": 7, "segmentation": [[0, 0, 4, 0, 4, 7, 0, 7]], "bbox": [0, 0, 1, 1]},
            {"image_id": 8, "segmentation": {"counts": "x"}, "bbox": [2, 1, 3, 2]},
        ],
    }
    file = tmp_path / "masks.json"
    file.write_text(json.dumps(content))
    masks = find_masks(file)
    # two images have the name 1, and of the third nothing is known
    assert set(masks) == {"a/1", "b/1"}
    inside = is_inside(masks["a/1"].read())
    assert inside.shape == (8, 10)
    assert inside[:, :5].all()
    assert not inside[:, 5:].any()
    box = is_inside(masks["b/1"].read())
    assert box[1:4, 2:6].all()
    assert box.sum() == 12
    assert find_mask(masks, "photos/b/1.png") is masks["b/1"]
    assert find_mask(masks, "photos/c/1.png") is None
    # no memory is taken for a size that the image doesn't have
    content["images"][0] |= {"width": 10**6, "height": 10**6}
    file.write_text(json.dumps(content))
    assert find_masks(file)["a/1"].size == (10**6, 10**6)
    content["images"][1]["id"] = 7
    file.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="two images have the same id"):
        find_masks(file)
    file.write_text('{"images": [{}]}')
    with pytest.raises(ValueError, match="not a COCO file"):
        find_masks(file)
