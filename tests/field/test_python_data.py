"""Images, labels, losses and overrides in the forms in which Python programs hold them."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from torch.utils import data as torch_data

import vit
from vit.config import list_overrides, load_config
from vit.data.images import list_images
from vit.data.python_images import convert_pixels, read_labels
from vit.data.sources.python_objects import find_python_objects
from vit.training.result import TrainingResult

CONFIG: dict[str, Any] = {
    "data": {"image_size": 8},
    "model": {"patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2},
    "optimizer": {"lr": 3e-3},
    "train": {"epochs": 2, "batch_size": 16, "device": "cpu", "precision": "float32"},
}
NAMES = ("red", "green", "blue")
NUM_IMAGES = 45


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    """Noise that is brighter in the channel of its class, uint8 [45, 9, 9, 3]."""
    random, labels = np.random.default_rng(0), np.arange(NUM_IMAGES) % 3
    pixels = random.integers(0, 120, (NUM_IMAGES, 9, 9, 3), dtype=np.uint8)
    pixels[np.arange(NUM_IMAGES), :, :, labels] += 60
    return pixels


LABELS = np.arange(NUM_IMAGES) % 3


class Items(torch_data.Dataset[Any]):
    """A map-style set of items, which are made when they are asked for."""

    def __init__(self, make: Callable[[int], Any]) -> None:
        self.make = make

    def __len__(self) -> int:
        return NUM_IMAGES

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


class Stream(torch_data.IterableDataset[Any]):
    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)


def pairs(images: np.ndarray) -> list[tuple[np.ndarray, int]]:
    return list(zip(images, LABELS.tolist(), strict=True))


def first(images: np.ndarray) -> Tensor:
    """Channels first."""
    return torch.from_numpy(images).permute(0, 3, 1, 2)


ONE_HOT = np.eye(3, dtype=np.int64)[LABELS]
# Each gives the same images and labels.
FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "a loader": lambda x: torch_data.DataLoader(Items(pairs(x).__getitem__), shuffle=True),
    "a loader of a stream": lambda x: torch_data.DataLoader(Stream(pairs(x)), batch_size=4),
    "a stream": lambda x: Stream(pairs(x)),
    "a generator": lambda x: (item for item in pairs(x)),
    "a subset": lambda x: torch_data.Subset(Items(pairs(x).__getitem__), range(NUM_IMAGES)),
    "dictionaries": lambda x: [
        {"image": Image.fromarray(image), "label": label, "id": label} for image, label in pairs(x)
    ],
    "pixel_values": lambda x: Items(
        lambda index: {"pixel_values": first(x)[index] / 255, "labels": torch.tensor(LABELS[index])}
    ),
    "float arrays": lambda x: ((x / 255).astype(np.float32), LABELS),
    "float tensors": lambda x: torch_data.TensorDataset(first(x) / 255, torch.from_numpy(LABELS)),
    "half precision": lambda x: (first(x).to(torch.float16) / 255, LABELS),
    "channels first": lambda x: (first(x).numpy(), LABELS),
    "whole floats": lambda x: (x, LABELS.astype(np.float32)),
    "columns": lambda x: (x, LABELS[:, None]),
    "one-hot": lambda x: (x, ONE_HOT.astype(np.float32)),
    "one-hot tensors": lambda x: torch_data.TensorDataset(first(x), torch.from_numpy(ONE_HOT)),
    "lists": lambda x: ([Image.fromarray(image) for image in x], LABELS.tolist()),
    "names": lambda x: (x, [NAMES[label] for label in LABELS]),
}


def hash_sets(
    form: Any, class_names: tuple[str, ...] | None = NAMES
) -> tuple[list[int], list[int]]:
    source = find_python_objects(form, class_names)
    dataset = source.load("train")
    return np.frombuffer(dataset.reader.cache_key(), np.uint64).tolist(), dataset.labels.tolist()


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_the_same_set(images: np.ndarray, form: str) -> None:
    digests, labels = hash_sets(FORMS[form](images))
    assert labels == LABELS.tolist()
    assert digests == hash_sets((images, LABELS))[0]


@pytest.mark.parametrize("form", ["one-hot", "whole floats", "a loader"])
def test_classes_without_names_are_counted(images: np.ndarray, form: str) -> None:
    dataset = find_python_objects(FORMS[form](images), None).load("train")
    assert dataset.class_names == ("class 0", "class 1", "class 2")


def test_booleans_are_two_classes(images: np.ndarray) -> None:
    for labels in (LABELS == 1, (LABELS == 1).tolist(), torch.from_numpy(LABELS == 1)):
        dataset = find_python_objects((images, labels), ("other", "green")).load("train")
        assert dataset.labels.tolist() == (LABELS == 1).astype(int).tolist()


def test_one_channel_is_grey(images: np.ndarray) -> None:
    grey = images[..., :1]
    expected = hash_sets((np.repeat(grey, 3, axis=3), LABELS))[0]
    for form in (
        grey,
        grey[..., 0],
        grey.transpose(0, 3, 1, 2),
        torch.from_numpy(grey[..., 0]) / 255,
    ):
        assert hash_sets((form, LABELS))[0] == expected


def test_pairs_and_dictionaries_of_sets_are_splits(images: np.ndarray) -> None:
    train, validation = pairs(images)[:30], pairs(images)[30:]
    for form in (
        (train, validation),
        (torch_data.DataLoader(train), torch_data.DataLoader(validation)),
        {"train": train, "validation": validation},
        {"train": train, "test": validation},
        ((images[:30], LABELS[:30]), (images[30:], LABELS[30:])),
    ):
        source = find_python_objects(form, NAMES)
        assert [len(source.load(split)) for split in source.origins] == [30, 15]
    # the sampler of a loader leaves images out, as users divide a set in two
    indices = list(range(30))
    sampled = [
        torch_data.DataLoader(pairs(images), sampler=torch_data.SubsetRandomSampler(part))
        for part in (indices, list(range(30, 45)))
    ]
    source = find_python_objects(tuple(sampled), NAMES)
    assert [len(source.load(split)) for split in source.origins] == [30, 15]
    assert source.load("train").labels.tolist() == LABELS[:30].tolist()


def test_class_names_come_from_the_set(images: np.ndarray) -> None:
    items = Items(pairs(images).__getitem__)
    items.classes = list(NAMES)  # type: ignore[attr-defined]
    for form in (items, torch_data.Subset(items, range(9)), torch_data.DataLoader(items)):
        assert find_python_objects(form, None).load("train").class_names == NAMES


@pytest.mark.extended
def test_a_set_of_hugging_face_has_its_names(images: np.ndarray) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=list(NAMES))}
    )
    pictures = [Image.fromarray(image) for image in images]
    hub = datasets.Dataset.from_dict({"image": pictures, "label": LABELS}, features=features)
    source = find_python_objects(datasets.DatasetDict({"train": hub, "test": hub}), None)
    assert list(source.origins) == ["train", "test"]
    assert source.load("train").class_names == NAMES
    stream = hub.to_iterable_dataset()
    assert find_python_objects(stream, None).load("train").class_names == NAMES
    assert hash_sets(hub)[0] == hash_sets((images, LABELS))[0]


def weighted(images: np.ndarray) -> Any:
    sampler = torch_data.WeightedRandomSampler([1.0] * NUM_IMAGES, NUM_IMAGES)
    return torch_data.DataLoader(pairs(images), sampler=sampler)


class Frame:
    """Has what is used of a DataFrame of pandas."""

    iloc = ()

    def __len__(self) -> int:
        return 3

    def __getitem__(self, column: str) -> Any:
        raise KeyError(column)


# name → (set, sentence)
REFUSED: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "0 to 255 as float tensors": (
        lambda x: (first(x).float(), LABELS),
        "item 0 of dataset is a tensor of values from 0 to 1[0-9]+, not 0 to 1; divide by",
    ),
    "two scales": (
        lambda x: (x * np.where(np.arange(NUM_IMAGES) < 9, 1, 1 / 255)[:, None, None, None], LABELS),
        "item 9 of dataset has values from 0 to 1, and other items have values beyond",
    ),
    "normalised": (lambda x: (first(x) / 127.5 - 1, LABELS), "leave out Normalize"),
    "NaN": (lambda x: (first(x) * torch.nan, LABELS), "values from nan"),
    "channels at both ends": (
        lambda x: (x[:, :3], LABELS), "whose channels may be the first or the last"
    ),
    "four channels": (lambda x: (np.repeat(x, 2, axis=3), LABELS), r"array of uint8 \[9, 9, 6\]"),
    "yes or no": (lambda x: (x > 9, LABELS), r"array of bool \[9, 9, 3\]"),
    "several labels": (lambda x: (x, ONE_HOT + np.eye(3, dtype=int)[0]), "rows such as .* not one 1"),
    "soft labels": (lambda x: (x, ONE_HOT * 0.9 + 0.03), "not one 1 among"),
    "fractions": (lambda x: (x, LABELS / 2), "not integers from 0, nor all .* one is 0.5"),
    "no labels": (lambda x: (x, [None] * NUM_IMAGES), "one is None"),
    "names of keys": (
        lambda x: [{"picture": x[0], "class": 0}], "has the keys picture, class; name one"
    ),
    "two images": (
        lambda x: [{"image": x[0], "pixel_values": x[0], "label": 0}], "name one of them image"
    ),
    "a weighted sampler": (weighted, r"WeightedRandomSampler, which vit doesn't draw by; pass its"),
    "splits of other names": (lambda x: {"a": pairs(x), "b": pairs(x)}, "is a dictionary of a, b"),
    "a path": (lambda x: "photos", "dataset is a str, not"),
    "paths": (lambda x: [("a.png", 0)], r"item 0 of dataset holds 'a.png', .*; open it \(PIL"),
    "a frame": (lambda x: Frame(), r"dataset is a Frame, .* \(data\.root=TABLE\.csv\)"),
    "too few names": (lambda x: (x, np.eye(5)[LABELS]), "one-hot rows of 5 classes, and there are 3"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_may_be_read_in_two_ways_is_refused(images: np.ndarray, case: str) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence) as error:
        hash_sets(make(images))
    assert len(str(error.value).splitlines()) == 1


def test_floats_are_rounded_to_the_nearest_of_256() -> None:
    levels = np.arange(256, dtype=np.uint8).reshape(16, 16)
    for kind in (np.float32, np.float64):
        assert (convert_pixels(levels.astype(kind) / kind(255)) == levels).all()
    # resampling may go beyond the ends by a rounding error
    assert (convert_pixels(np.array([[-1e-4, 1 + 1e-4]] * 2)) == [[0, 255]] * 2).all()


def test_labels_of_mixed_kinds_are_refused() -> None:
    assert read_labels([True, 0, 2.0, np.int64(1), torch.tensor(1)]) == ([1, 0, 2, 1, 1], None)
    for labels in ([0, "cat"], [0, [0, 1]], [[0, 1], [0, 1, 0]]):
        with pytest.raises(ValueError, match=r"labels of dataset are"):
            read_labels(labels)


# --- one place for all functions


@pytest.fixture(scope="module")
def run(images: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> TrainingResult:
    output = tmp_path_factory.mktemp("field") / "run"
    loader = torch_data.DataLoader(Items(pairs(images).__getitem__), batch_size=4)
    return vit.train(CONFIG, output=output, dataset=loader, class_names=NAMES)


IMAGE_FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    "floats": lambda x: x / 255,
    "channels first": lambda x: first(x),
    "a loader": lambda x: torch_data.DataLoader(Items(pairs(x).__getitem__)),
    "a set": lambda x: Items(pairs(x).__getitem__),
    "dictionaries": lambda x: [{"pixel_values": image, "labels": 0} for image in first(x)],
    "pairs": lambda x: [(Image.fromarray(image), "red") for image in x],
    "images and labels": lambda x: (x, LABELS),
    "a list": list,
}


@pytest.mark.parametrize("form", IMAGE_FORMS)
def test_predict_and_explain_take_them(images: np.ndarray, form: str) -> None:
    found = list(list_images(IMAGE_FORMS[form](images)))
    assert len(found) == NUM_IMAGES
    for image, expected in zip(found, images, strict=True):
        assert (np.asarray(image) == expected).all()


def test_one_item_is_one_image(images: np.ndarray, run: TrainingResult) -> None:
    answers = [
        vit.predict(run.bundle, form).predictions[0].classes
        for form in (images[0], (images[0], 1), {"image": images[0], "label": 1}, first(images)[0])
    ]
    assert all(answer == answers[0] for answer in answers)
    # two images are no image and label
    assert len(list(list_images((Image.fromarray(images[0]), "other.png")))) == 2


def test_evaluate_and_explain_read_what_train_reads(
    images: np.ndarray, run: TrainingResult
) -> None:
    results = [
        vit.evaluate(run.bundle, dataset=FORMS[form](images)).evaluation
        for form in ("a loader", "pixel_values", "one-hot")
    ]
    assert all(result.fingerprint == results[0].fingerprint for result in results)
    assert all(result.metrics == results[0].metrics for result in results)
    explained = vit.explain(run.bundle, FORMS["dictionaries"](images)[:2], checks=False)
    assert explained.maps["rollout"].shape[0] == 2


def test_an_audit_takes_a_loader(images: np.ndarray, run: TrainingResult) -> None:
    pytest.importorskip("cleanlab")
    result = vit.audit(
        dataset=FORMS["a loader"](images), class_names=NAMES, model=run.directory, device="cpu"
    )
    assert result.audit.num_images == NUM_IMAGES
    assert result.audit.class_names == NAMES
    for arguments in ({}, {"data": "digits", "dataset": images}):
        with pytest.raises(ValueError, match=r"which images|give one of them"):
            vit.audit(**arguments, model=run.directory)  # type: ignore[arg-type]


# --- losses


def focal(logits: Tensor, targets: Tensor, gamma: float = 0.0) -> Tensor:
    losses = F.cross_entropy(logits, targets, reduction="none")
    return (1 - torch.exp(-losses)) ** gamma * losses


def focal_two(logits: Tensor, targets: Tensor) -> Tensor:
    return focal(logits, targets, gamma=2.0)


def mean_focal(logits: Tensor, targets: Tensor) -> Tensor:
    return focal(logits, targets).mean()


class StopAfter(vit.Observer):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step(self, metrics: Any) -> bool:
        return bool(metrics["step"] == self.step)


def train(images: np.ndarray, output: Path, *overrides: str, **options: Any) -> TrainingResult:
    given = {"dataset": (images, LABELS), "class_names": NAMES, "overrides": overrides}
    return vit.train(CONFIG, output=output, **(given | options))


def have_equal_weights(first: TrainingResult, second: TrainingResult) -> bool:
    ours, theirs = (result.bundle.model.state_dict() for result in (first, second))
    return all(torch.equal(ours[name], theirs[name]) for name in ours)


MIXED = ("augment.mixup=0.8", "augment.cutmix=1.0")


@pytest.mark.parametrize("overrides", [(), pytest.param(MIXED, marks=pytest.mark.extended)])
def test_focal_loss_of_gamma_0_is_cross_entropy_bit_for_bit(
    images: np.ndarray, tmp_path: Path, overrides: tuple[str, ...]
) -> None:
    plain = train(images, tmp_path / "plain", *overrides)
    for name, loss in {"losses": focal, "mean": mean_focal}.items():
        other = train(images, tmp_path / name, *overrides, loss=loss)
        assert have_equal_weights(plain, other)
        assert [row["val_loss"] for row in other.metrics] == [
            row["val_loss"] for row in plain.metrics
        ]
    assert not have_equal_weights(
        plain, train(images, tmp_path / "focal", *overrides, loss=focal_two)
    )


def test_a_run_with_a_loss_resumes_bit_for_bit(images: np.ndarray, tmp_path: Path) -> None:
    given = {"loss": focal_two}
    whole = train(images, tmp_path / "whole", **given)
    run = tmp_path / "run"
    stopped = train(images, run, **given, callbacks=[StopAfter(3)])
    assert stopped.steps == 3
    again = {"dataset": (images, LABELS), "class_names": NAMES, "resume": True, "output": run}
    for changed, sentence in (
        ({"loss": focal}, "loss is <function focal_two> there, <function focal> here"),
        ({}, "the argument loss is <function focal_two> there, None here"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=sentence):
            vit.train(**again, **changed)  # type: ignore[arg-type]
    assert have_equal_weights(whole, vit.train(**again, **given))  # type: ignore[arg-type]


def test_weights_and_mixed_images_leave_the_validation_loss_alone(
    images: np.ndarray, tmp_path: Path
) -> None:
    options = ("augment.mixup=0.8", "augment.cutmix=1.0", "train.calibrate=false")
    with pytest.raises(ValueError, match=r"batch_size 7 must be .*; mixup and cutmix mix pairs"):
        train(images, tmp_path / "odd", *options, "train.batch_size=7")
    result = train(images, tmp_path / "run", *options, "train.class_balance=weights")
    best = max(result.metrics, key=lambda row: (row["val_top1"], -row["val_loss"]))
    evaluation = vit.evaluate(result.bundle, precision="float32").evaluation
    # of the plain mean over the images
    assert evaluation.metrics["loss"] == pytest.approx(best["val_loss"], abs=1e-5)


class Learnt(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, targets: Tensor) -> Tensor:
        return self.scale * F.cross_entropy(logits, targets)


def only_classes(logits: Tensor, targets: Tensor) -> Tensor:
    return -logits.log_softmax(1).gather(1, targets[:, None]).mean()


# name → (arguments, sentence)
MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "no function": ({"loss": 3}, "loss is an int, not a function"),
    "a learnt loss": ({"loss": Learnt()}, "Learnt has weights of its own"),
    "no differentiation": ({"loss": lambda x, y: torch.zeros(())}, "to differentiate"),
    "a number": ({"loss": lambda x, y: 1.0}, "gives float, not a mean"),
    "a failure": ({"loss": lambda x, y: x[9, 9, 9]}, r"of logits \[\d+, 3\] and targets \[\d+\] fails"),
    "mixed images": (
        {"loss": only_classes, "overrides": {"augment.mixup": 0.5}},
        r"of logits \[\d+, 3\] and targets \[\d+, 3\] fails",
    ),
    "a mean with weights": (
        {"loss": mean_focal, "overrides": ["train.class_balance=weights"]},
        "in which classes can't be weighted",
    ),
    "smoothing": (
        {"loss": focal, "overrides": {"train.label_smoothing": 0.1}}, "leave train.label_smoothing"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", MISTAKES)
def test_a_mistake_in_a_loss_is_one_sentence(images: np.ndarray, tmp_path: Path, case: str) -> None:
    arguments, sentence = MISTAKES[case]
    with pytest.raises(ValueError, match=sentence) as error:
        train(images, tmp_path / "run", **arguments)
    assert len(str(error.value).splitlines()) == 1


# --- overrides


def test_overrides_are_texts_or_a_dictionary() -> None:
    sections = {"data": {"name": "digits", "image_size": 8}}
    texts = ["train.epochs=3", "optimizer.lr=0.00001", "data.classes=['0', '1']", "data.root=null"]
    flat = {"train.epochs": 3, "optimizer.lr": 1e-05, "data.classes": ["0", "1"], "data.root": None}
    nested = {
        "train": {"epochs": 3}, "optimizer": {"lr": 1e-05},
        "data": {"classes": ["0", "1"], "root": None},
    }  # fmt: skip
    configs = [load_config(sections, list_overrides(form)) for form in (texts, flat, nested)]
    assert configs[0] == configs[1] == configs[2]
    paths = list_overrides({"data.root": Path("a b: [c"), "model.init": "yes"})
    config = load_config(sections, paths)
    assert str(config.data.root).endswith("a b: [c")
    assert config.model.init == "yes"


def test_a_dictionary_of_overrides_trains(images: np.ndarray, tmp_path: Path) -> None:
    result = train(images, tmp_path / "run", overrides={"train": {"epochs": 1}})
    assert len(result.metrics) == 1
    with pytest.raises(ValueError, match=r"did you mean train\.epochs"):
        train(images, tmp_path / "other", overrides={"train.epoch": 1})
