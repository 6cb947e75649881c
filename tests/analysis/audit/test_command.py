"""`vit audit` finds a planted error; what is accepted goes into a training, and nothing is moved."""

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import Launcher, SaveModel
from vit.data.corrections import read_corrections
from vit.data.open import open_dataset

# classes and a file name that would be markup, a path or a formula
HOSTILE = ("<b>red", '"blue",')
HOSTILE_FILE = "<img src=x onerror=alert(1)>.png"
TRAIN = [
    "data.image_size=16", "model.patch_size=8", "model.embed_dim=16", "model.depth=1",
    "model.num_heads=2", "train.epochs=1", "train.batch_size=16", "train.device=cpu",
    "train.precision=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red and blue images; the first of the red ones is blue."""
    root = tmp_path_factory.mktemp("audited") / "photos"
    rng = np.random.default_rng(0)
    for label, class_name in enumerate(HOSTILE):
        (root / class_name).mkdir(parents=True)
        for number in range(20):
            pixels = rng.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            is_wrong = label == 0 and number == 0
            pixels[..., 2 if label == 1 or is_wrong else 0] += 150
            name = HOSTILE_FILE if is_wrong else f"{number:02d}.png"
            Image.fromarray(pixels).save(root / class_name / name)
    return root


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    return save_model(tmp_path_factory.mktemp("weights") / "model.safetensors")


@pytest.fixture(scope="module")
def audited(
    folder: Path, weights: Path, tmp_path_factory: pytest.TempPathFactory, cli: Launcher
) -> Path:
    output = tmp_path_factory.mktemp("audit") / "out"
    cli.succeed("audit", folder, "--model", weights, "--output", output, "--device", "cpu")
    return output


def test_the_planted_error_comes_first_with_the_right_class(audited: Path) -> None:
    content = json.loads((audited / "audit.json").read_text())
    error = content["label_errors"][0]
    assert error.keys() == {"path", "given", "suggested", "score"}
    assert error["path"].endswith(HOSTILE_FILE)
    assert (error["given"], error["suggested"]) == HOSTILE


def test_names_are_inert_on_the_page(audited: Path) -> None:
    page = (audited / "audit.html").read_text()
    assert "<b>red" not in page
    assert "<img src=x" not in page
    assert "&lt;b&gt;red" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")


def test_accepted_suggestions_are_applied_and_change_the_fingerprint(
    audited: Path, folder: Path, tmp_path: Path
) -> None:
    (error, *_) = json.loads((audited / "audit.json").read_text())["label_errors"]
    corrections = tmp_path / "corrections.csv"
    with corrections.open("w", newline="") as file:
        rows = [("path", "given", "label"), (error["path"], error["given"], error["suggested"])]
        csv.writer(file, lineterminator="\n").writerows(rows)
    files = sorted(map(str, folder.rglob("*")))

    before = open_dataset("folder", root=folder).split("all")
    after = replace(
        open_dataset("folder", root=folder), corrections=read_corrections(corrections)
    ).split("all")
    (changed,) = np.flatnonzero(before.labels != after.labels)
    assert after.ids[changed] == error["path"]
    assert after.class_names[after.labels[changed]] == HOSTILE[1]

    runs = []
    for extra in ([], [f"data.corrections={corrections}"]):
        output = tmp_path / f"run-{len(extra)}"
        runs.append(vit.train(folder, output=output, overrides=[*TRAIN, *extra]).bundle)
    plain, corrected = runs
    assert plain.data["fingerprint"] != corrected.data["fingerprint"]
    # the model file doesn't need the table
    assert corrected.config["data"]["corrections"] == {error["path"]: HOSTILE[1]}
    assert plain.config["data"]["corrections"] is None
    assert sorted(map(str, folder.rglob("*"))) == files


def test_corrections_that_do_not_fit_are_refused(
    folder: Path, tmp_path: Path, cli: Launcher
) -> None:
    table = tmp_path / "table.csv"
    for text, problem in (
        ("name,label\na,b\n", "line 1 is not path,given,label"),
        ("path,given,label\na.png,b\n", "line 2"),
        ("path,given,label\na,b,c\na,b,d\n", "a second label"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_corrections(table)
    table.write_text("path,given,label\ngone.png,a,b\n")
    arguments = ("train", folder, *TRAIN, f"data.corrections={table}", "--output", tmp_path / "run")
    assert "names 1 images that are not among those" in cli.fail(*arguments)
    name = sorted(path.name for path in (folder / HOSTILE[1]).iterdir())[0]
    table.write_text(f'path,given,label\n"{HOSTILE[1].replace(chr(34), chr(34) * 2)}/{name}",a,b\n')
    assert "unknown label of" in cli.fail(*arguments)


def test_features_must_be_named(folder: Path, tmp_path: Path, cli: Launcher) -> None:
    assert "add --model" in cli.fail("audit", folder, "--output", tmp_path / "out")
