"""Groups hold: no group is on both sides of a split or a fold, whatever the other classes have."""

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.conftest import save_noise
from vit.analysis.audit.suspects import Audit, audit_images
from vit.data.dataset import ImageDataset, ImageRule
from vit.data.open import open_dataset
from vit.data.sources.base import ArrayReader
from vit.data.splits import DatasetSplits
from vit.prediction.batch_predictor import Features
from vit.training.folds import assign_folds, name_always_trained
from vit.training.linear_probe import fit_probe


def check_folds(folds: np.ndarray, labels: np.ndarray, groups: list[str]) -> None:
    """No group is in two folds, and each class that is measured is trained on in every fold."""
    names = np.array(groups)
    for group in set(groups):
        assert len(set(folds[(names == group) & (folds >= 0)].tolist())) <= 1
    for label in set(labels[folds >= 0].tolist()):
        assert len(set(folds[labels == label].tolist())) > 1


def test_a_class_of_one_group_is_always_trained_on_and_costs_the_others_nothing() -> None:
    labels = np.array([0] * 50 + [1] * 50 + [2] * 4)
    groups = [f"s{number % 5}" for number in range(100)] + ["s0"] * 4
    folds = assign_folds(labels, groups, num_folds=5)
    assert (folds[labels == 2] == -1).all()
    assert np.bincount(folds[:100]).tolist() == [20] * 5
    check_folds(folds, labels, groups)
    # the others are divided as if the class weren't there
    assert (assign_folds(labels[:100], groups[:100]) == folds[:100]).all()


@pytest.mark.parametrize("seed", range(30))
def test_folds_of_any_groups_hold(seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_groups = int(rng.integers(2, 12))
    # each class at some of the sites, one or two of them at one site alone
    sites = [rng.choice(num_groups, rng.integers(1, num_groups + 1), False) for _ in range(5)]
    labels = np.repeat(np.arange(5), 12)
    groups = [f"s{rng.choice(sites[label])}" for label in labels]
    folds = assign_folds(labels, groups, num_folds=5)
    check_folds(folds, labels, groups)
    assert sorted(set(folds[folds >= 0].tolist())) == list(range(folds.max() + 1))


def test_classes_that_are_never_left_out_are_named() -> None:
    folds, labels = np.array([0, 1, -1]), np.array([0, 0, 1])
    # of the third class there is no image
    for each in (labels, labels[:, None] == np.arange(3)):
        assert name_always_trained(folds, each, tuple("abc")).endswith(": b")
        assert name_always_trained(folds[:2], each[:2], tuple("abc")) == ""


def test_folds_without_groups_are_as_they_were() -> None:
    labels = np.array([0] * 7 + [1] * 5 + [2])
    assert assign_folds(labels).tolist() == [0, 1, 0, 2, 1, 4, 3, 0, 3, 4, 1, 2, -1]


def draw_sites(
    rng: np.random.Generator, num_sites: int, centres: np.ndarray, *, rare: bool
) -> tuple[np.ndarray, np.ndarray, list[str]]:
    """Features of bursts of photos at sites with offsets of their own; a rare class at one site."""
    labels = np.tile(np.repeat([0, 1, 2], 4), num_sites)
    sites = np.repeat(np.arange(num_sites), 12)
    if rare:
        labels, sites = np.append(labels, [3] * 4), np.append(sites, [0] * 4)
    offsets = rng.normal(size=(num_sites, 3, centres.shape[1]))
    features = centres[labels] + offsets[sites, labels % 3]
    features += 0.2 * rng.normal(size=features.shape)
    return features, labels, [f"site{site}" for site in sites]


def test_cross_validation_says_what_held_out_sites_say() -> None:
    differences = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        centres = rng.normal(size=(4, 6))
        values, labels, groups = draw_sites(rng, 10, centres, rare=True)
        features: Features = {(1, "avg"): torch.from_numpy(values).float()}
        probe = fit_probe(features, labels, assign_folds(labels, groups), num_classes=4)
        others, other_labels, _ = draw_sites(rng, 200, centres, rare=False)
        truth = (probe.compute_logits(others).argmax(axis=1) == other_labels).mean()
        assert probe.accuracy is not None
        differences.append(probe.accuracy - truth)
    assert abs(np.mean(differences)) < 0.04


def test_blocks_are_chosen_by_what_new_groups_show() -> None:
    """A block that knows the site, in which the label is drawn, and one that knows the class."""
    rng = np.random.default_rng(0)
    sites = np.repeat(np.arange(20), 10)
    labels = np.repeat(rng.permutation(20) % 2, 10)
    known_sites = rng.normal(size=(20, 32))[sites] * 3
    features: Features = {
        (depth, "avg"): torch.from_numpy(values + 0.5 * rng.normal(size=(200, 32))).float()
        for depth, values in enumerate(
            [*(known_sites + rng.normal(size=(200, 32)) * 0.1 for _ in range(5)),
             np.eye(32)[labels] * 1.5],
            start=1,
        )
    }  # fmt: skip
    groups = [f"s{site}" for site in sites]
    by_site = assign_folds(labels, groups)
    assert fit_probe(features, labels, by_site, num_classes=2).readout == (6, "avg")
    # by photo, each of the others looks perfect
    assert fit_probe(features, labels, assign_folds(labels), num_classes=2).readout != (6, "avg")


def test_a_run_of_classes_of_one_group_each_is_not_cross_validated() -> None:
    rng = np.random.default_rng(0)
    labels = np.repeat([0, 1], 20)
    features: Features = {(1, "avg"): torch.from_numpy(rng.normal(size=(40, 4))).float()}
    alone = assign_folds(labels, ["a"] * 20 + ["b"] * 20)
    probe = fit_probe(features, labels, alone, num_classes=2)
    assert (probe.accuracy, probe.strength) == (None, 1e-2)
    # one class has two groups: the probe that always predicts it would be right
    folds = assign_folds(labels, ["a"] * 10 + ["c"] * 10 + ["b"] * 20)
    assert fit_probe(features, labels, folds, num_classes=2).accuracy is None


# --- audit


def test_an_audit_of_a_class_of_one_image_judges_the_others() -> None:
    rng = np.random.default_rng(0)
    labels = np.append(np.repeat([0, 1], 20), [2])
    features = (rng.normal(size=(3, 8))[labels] * 4 + rng.normal(size=(41, 8))).astype(np.float32)
    for groups in (None, [f"s{number % 7}" for number in range(40)] + ["s9"]):
        found = audit_arrays(features, labels, groups)
        assert (found.top1, found.not_examined) == (1, ["c"])


def audit_arrays(
    features: np.ndarray, labels: np.ndarray, groups: list[str] | None = None
) -> Audit:
    """Audit different images of the classes a, b and c."""
    digests = np.random.default_rng(0).integers(2**63, size=(2, len(labels)), dtype=np.uint64)
    dataset = ImageDataset(
        name="x", class_names=("a", "b", "c"), labels=labels, groups=groups, hashes=digests,
        ids=list(map(str, range(len(labels)))),
        reader=ArrayReader(np.zeros((len(labels), 4, 4, 3), np.uint8)),
    )  # fmt: skip
    return audit_images(dataset, features, data="x", model="", model_sha256="")


# --- splits

SPECIES = {
    "Leer": range(1, 9), "Reh": range(1, 9), "Dachs": (1, 2, 4, 6, 8),
    "Rotfuchs": (1, 3, 4, 5, 7), "Luchs": (3,), "Marder": (2, 5),
}  # fmt: skip


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Photos of species at camera sites."""
    root = tmp_path_factory.mktemp("sites")
    names = [
        f"{name}/SITE{site}_{number}.png"
        for name, places in SPECIES.items()
        for site in places
        for number in range(4)
    ]
    save_noise(root, names, size=(4, 4))
    return root


def open_sites(root: Path, seed: int) -> DatasetSplits:
    rule = ImageRule(split_seed=seed, group_by=r"(SITE\d+)", validation_fraction=0.2)
    return open_dataset("folder", root=root, rule=rule)


@pytest.mark.parametrize("seed", range(12))
def test_each_class_of_three_groups_is_in_each_split(sites: Path, seed: int) -> None:
    splits = open_sites(sites, seed)
    datasets = {name: splits.split(name) for name in ("train", "validation", "test")}
    found = [set(dataset.groups or ()) for dataset in datasets.values()]
    assert sum(map(len, found)) == len(set().union(*found)) == 8
    for dataset in datasets.values():
        present = {dataset.class_names[label] for label in dataset.labels}
        assert present >= {"Leer", "Reh", "Dachs", "Rotfuchs"}
    assert {"Luchs", "Marder"} <= {
        datasets["train"].class_names[label] for label in datasets["train"].labels
    }
    notes = " ".join(datasets["train"].notes)
    assert "the test split has no image of" in notes
    assert "the validation split has no image of" in notes
    assert notes.count("Luchs") == 2
    assert "Rotfuchs" not in notes
