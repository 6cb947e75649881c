"""`vit evaluate`: what it leaves, what it warns of, and one line for a mistake."""

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import Launcher, Outcome, SaveModel
from vit.bundle import load_bundle
from vit.data.cache import decode_dataset
from vit.data.dataset import ImageRule
from vit.data.open import open_dataset
from vit.data.preprocess import Preprocess
from vit.evaluation.intervals import compute_clustered_interval
from vit.evaluation.metrics import score_logits
from vit.evaluation.predictions import save_predictions
from vit.prediction.probabilities import compute_log_probabilities
from vit.runtime.files import read_arrays, write_arrays

CLASSES = ("bee", "cat", "dog")


def draw(seed: int) -> Image.Image:
    coarse = np.random.default_rng(seed).integers(0, 256, (6, 6, 3), dtype=np.uint8)
    return Image.fromarray(coarse).resize((36, 28), Image.Resampling.BICUBIC)


def write_images(root: Path, *, split: str, first_seed: int, count: int = 6) -> None:
    for number, name in enumerate(CLASSES):
        folder = root / split / name
        folder.mkdir(parents=True)
        for index in range(count):
            draw(first_seed + 100 * number + index).save(folder / f"{index}.png")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Eighteen training and eighteen test pictures of three classes."""
    write_images(tmp_path / "set", split="train", first_seed=0)
    write_images(tmp_path / "set", split="test", first_seed=1000)
    return tmp_path / "set"


@pytest.fixture
def model_file(root: Path, tmp_path: Path, save_model: SaveModel) -> Path:
    """An untrained model that says it was trained on the training pictures."""
    config = {
        "data": {"name": "folder", "root": str(root), "validation_fraction": 0.3},
        "train": {"seed": 1},
    }
    dataset = decode_dataset(open_dataset("folder", root=root).split("train"), Preprocess((8, 8)))
    return save_model(
        tmp_path / "run" / "model.safetensors",
        preprocess=Preprocess((16, 16), crop_pct=0.8),
        class_names=CLASSES,
        config=config,
        data={"name": "folder", "fingerprint": dataset.fingerprint},
        training_hashes=tuple(np.ascontiguousarray(dataset.hashes)),
        embed_dim=16,
        num_heads=2,
    )


Evaluate = Callable[..., Outcome]


@pytest.fixture
def evaluate(cli: Launcher) -> Evaluate:
    # pictures of two errors are the same promise as those of sixteen
    options = ("--device", "cpu", "--precision", "float32", "--num-examples", 2)
    return lambda *arguments: cli.run("evaluate", *options, *arguments)


def read_predictions(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


def test_leaves_figures_predictions_pictures_and_a_report(
    evaluate: Evaluate, model_file: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    code, screen, _ = evaluate(model_file.parent, "--output", out)
    assert code == 0
    assert "18 images of set (test)" in screen
    metrics = json.loads((out / "evaluation.json").read_text())
    assert metrics["num_images"] == 18
    assert (metrics["split"], metrics["data"]) == ("test", "set")
    assert metrics["model_sha256"] == load_bundle(model_file).sha256
    assert metrics["duplicates_of_training"] == {
        "exact": 0,
        "near": 0,
        "examples": [],
        "accuracy_without": metrics["metrics"]["top1"],
    }
    rows = read_predictions(out / "predictions.csv")
    assert len(rows) == 18
    right = [row["label"] == row["predicted"] for row in rows]
    assert metrics["metrics"]["top1"] == np.mean(right)
    probabilities = [
        {name: float(row[f"probability of {name}"]) for name in CLASSES} for row in rows
    ]
    assert [max(row, key=row.__getitem__) for row in probabilities] == [
        row["predicted"] for row in rows
    ]
    assert [sum(row.values()) for row in probabilities] == pytest.approx([1] * 18, abs=1e-6)
    assert metrics["metrics"]["loss"] == pytest.approx(
        np.mean([float(row["loss"]) for row in rows]), abs=1e-12
    )
    report = (out / "report.html").read_text()
    assert "</html>" in report
    # Each map is shown with the patches whose removal turns the answer, if there are some.
    turned = re.findall(
        r"without [0-9]+ patch(?:es)? it is predicted as|Removing up to a q", report
    )
    assert len(turned) == report.count('alt="map of') > 0
    # The folder has a name of its own.
    assert "run on set: 18 images (test), 3 classes" in report


def test_duplicates_unreadable_files_and_a_shuffled_class_order_are_dealt_with(
    evaluate: Evaluate, model_file: Path, root: Path, tmp_path: Path
) -> None:
    code, _, _ = evaluate(model_file, "--output", tmp_path / "before")
    assert code == 0
    # another copy: one training image among them, one file cut short, and a class before the others
    # by name
    other = tmp_path / "other"
    for name in CLASSES:
        (other / "test").mkdir(parents=True, exist_ok=True)
        (root / "test" / name).rename(other / "test" / name)
    (other / "test" / "dog" / "planted.png").write_bytes(
        (root / "train" / "dog" / "3.png").read_bytes()
    )
    broken = other / "test" / "bee" / "9.png"
    broken.write_bytes((other / "test" / "bee" / "0.png").read_bytes()[:90])
    labels = ["path,label,split"] + [
        f"{path.relative_to(other)},{path.parent.name},test"
        for path in sorted(other.glob("test/*/*.png"), reverse=True)
    ]
    (other / "labels.csv").write_text("\n".join(labels))
    code, screen, _ = evaluate(model_file, "--data", other, "--output", tmp_path / "after")
    assert code == 0
    metrics = json.loads((tmp_path / "after" / "evaluation.json").read_text())
    assert metrics["num_images"] == 18 + 1  # the broken one is no denominator's
    assert [name for name, _ in metrics["unreadable"]] == ["test/bee/9.png"]
    assert metrics["duplicates_of_training"]["exact"] == 1
    assert metrics["duplicates_of_training"]["examples"] == ["test/dog/planted.png"]
    assert "1 images could not be read and are not counted" in " ".join(screen.split())
    assert "1 of these images were in training" in " ".join(screen.split())
    rows = read_predictions(tmp_path / "after" / "predictions.csv")
    others = [row["label"] == row["predicted"] for row in rows if "planted" not in row["path"]]
    top1 = metrics["duplicates_of_training"]["accuracy_without"]
    assert top1 == pytest.approx(np.mean(others))
    assert f"with them and {100 * top1:.0f} % without" in " ".join(screen.split())
    before = {row["path"]: row for row in read_predictions(tmp_path / "before" / "predictions.csv")}
    after = {row["path"]: row for row in read_predictions(tmp_path / "after" / "predictions.csv")}
    for path, row in before.items():
        assert (after[path]["label"], after[path]["predicted"]) == (row["label"], row["predicted"])


def test_an_operating_point_is_told_and_kept_in_a_copy_of_the_model(
    evaluate: Evaluate, model_file: Path, root: Path, tmp_path: Path
) -> None:
    # 36 validation images
    shutil.rmtree(root / "train")
    write_images(root, split="train", first_seed=0, count=40)
    before = model_file.read_bytes()
    few = ("--data", root, "--num-examples", "0")
    first = tmp_path / "first"
    rule = ("--operating-point", "bee:sensitivity=0.75")
    assert evaluate(model_file, *few, "--output", first, *rule)[0] == 0
    assert model_file.read_bytes() == before
    decided = load_bundle(first / "model.safetensors")
    written = json.loads((first / "evaluation.json").read_text())
    assert written["model_sha256"] == decided.sha256
    assert written["operating_point"] == "bee:sensitivity=0.75"
    # the directory of an evaluation isn't replaced with the model in it
    again = (first, "--data", root, "--output", first, "--overwrite")
    assert ", from which this is made" in evaluate(*again)[2]
    # a second evaluation uses what the first one chose
    assert evaluate(first, *few, "--output", tmp_path / "second")[0] == 0
    threshold = decided.operating_point["thresholds"]["bee"]
    sentence = f"operating point bee:sensitivity=0.75: predicts bee from {threshold:.4g} on"
    for name in ("first", "second"):
        assert sentence in (tmp_path / name / "evaluation.json").read_text()
        rows = read_predictions(tmp_path / name / "predictions.csv")
        bees = [row for row in rows if row["predicted"] == "bee"]
        assert {float(row["probability"]) >= threshold for row in bees} <= {True}
        for row in rows:
            if row["label"] == "bee" and row["predicted"] != "bee":
                assert float(row["probability of bee"]) < threshold


@pytest.mark.chaos
def test_processes_share_the_work_and_leave_the_same_metrics(
    cli: Launcher, model_file: Path, tmp_path: Path
) -> None:
    arguments = ("--batch-size", 5, "--device", "cpu", "--precision", "float32")
    cli.finish(
        cli.start("evaluate", model_file, "--output", tmp_path / "many", *arguments, processes=2)
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        code, _, _ = cli.run("evaluate", model_file, "--output", tmp_path / "one", *arguments)
    finally:
        torch.set_num_threads(threads)
    assert code == 0
    assert (tmp_path / "one" / "predictions.csv").read_bytes() == (
        tmp_path / "many" / "predictions.csv"
    ).read_bytes()
    one, many = (
        json.loads((tmp_path / name / "evaluation.json").read_text()) for name in ("one", "many")
    )
    assert many["conditions"]["processes"] == "2"
    for name in one.keys() - {"conditions"}:
        assert one[name] == many[name], name


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--split", "tset"], "unknown split 'tset'; known: all, test, train, validation"),
        (
            ["--operating-point", "bee:f1", "--split", "all"],
            "which can't measure it, too; add --spl",
        ),
        (["--operating-point", "bee:sensitivity=0.99"], "allow no sensitivity=0.99, at most"),
        (["--precision", "bf16"], "unknown precision 'bf16'"),
    ],
)
def test_a_mistake_gets_one_line_and_leaves_nothing(
    cli: Launcher, model_file: Path, tmp_path: Path, arguments: list[str], sentence: str
) -> None:
    assert sentence in cli.fail("evaluate", model_file, "--output", tmp_path / "out", *arguments)
    assert not (tmp_path / "out").exists()


def test_a_root_without_training_images_is_evaluated(
    cli: Launcher, model_file: Path, tmp_path: Path
) -> None:
    write_images(tmp_path / "elsewhere", split="test", first_seed=2000)
    output = tmp_path / "evaluation"
    options = ("--root", tmp_path / "elsewhere", "--split", "test", "--output", output)
    cli.succeed("evaluate", model_file, *options)
    assert json.loads((output / "evaluation.json").read_text())["num_images"] == 18


def test_a_cross_validated_run_is_measured_by_its_out_of_fold_predictions(
    evaluate: Evaluate, save_model: SaveModel, root: Path, tmp_path: Path
) -> None:
    run, out = tmp_path / "run", tmp_path / "out"
    config = {
        "data": {
            "name": "folder", "root": str(root), "validation_fraction": 0.0, "group_by": r"/(\d)\.png",
        },
        "train": {"seed": 1},
    }  # fmt: skip
    everything = decode_dataset(
        open_dataset("folder", root=root, rule=ImageRule(validation_fraction=0)).split("train"),
        Preprocess((8, 8)),
    )
    save_model(
        run / "model.safetensors",
        preprocess=Preprocess((16, 16)),
        class_names=CLASSES,
        config=config,
        training_hashes=tuple(np.ascontiguousarray(everything.hashes)),
        embed_dim=16,
        num_heads=2,
    )
    # one image is never left out
    chosen = np.random.default_rng(0).permutation(18)[:17]
    images = everything.subset(chosen)
    logits = np.random.default_rng(1).normal(size=(17, 3)).astype(np.float32)
    scores = score_logits(logits, images.labels)
    file = run / "predictions.npz"
    save_predictions(file, images, scores, logits)
    code, _, error = evaluate(run, "--output", out, "--num-examples", "1")
    assert code == 0, error
    metrics = json.loads((out / "evaluation.json").read_text())
    assert (metrics["split"], metrics["num_images"]) == ("cross-validation", 17)
    groups = [name[-5] for name in images.ids]
    assert metrics["metrics"]["top1"] == scores.correct.mean()
    assert metrics["intervals"]["top1"] == list(
        compute_clustered_interval(scores.correct, np.unique(groups, return_inverse=True)[1])
    )
    rows = read_predictions(out / "predictions.csv")
    assert [row["path"] for row in rows] == list(images.ids)
    assert [row["group"] for row in rows] == groups
    assert metrics["duplicates_of_training"] is None
    assert "the model has seen these images" in (out / "report.html").read_text()
    # a threshold is chosen on the predictions of the folds
    rule = ("--operating-point", "bee:sensitivity=0.7")
    assert evaluate(run, "--output", tmp_path / "decided", *rule)[0] == 0
    decided = load_bundle(tmp_path / "decided" / "model.safetensors").operating_point
    is_bee = images.labels == CLASSES.index("bee")
    bees = np.sort(np.exp(compute_log_probabilities(logits, 1.0))[is_bee, CLASSES.index("bee")])
    # so many of these bees and a new one may be missed
    place = int(0.3 * (len(bees) + 1)) - 1
    assert bees[max(place - 1, 0)] <= decided["thresholds"]["bee"] <= bees[place]
    assert decided["num_images"] == 17
    assert "the measured ones" in (tmp_path / "decided" / "evaluation.json").read_text()
    arrays = read_arrays(file)
    write_arrays(file, arrays | {"digests": images.digests[::-1]})
    _, _, error = evaluate(run, "--output", tmp_path / "x")
    assert "the images have changed since the run was cross-validated" in error
    write_arrays(file, arrays | {"logits": logits[:, :2]})
    _, _, error = evaluate(run, "--output", tmp_path / "x")
    assert "predictions.npz is damaged, or of another model" in error
