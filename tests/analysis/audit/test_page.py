"""`vit audit` finds planted errors; its page, driven by keys, saves what is accepted; that goes into a
training, and nothing is moved."""

import csv
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import vit
from tests.browser import find_low_contrast, find_unnamed, find_wide, phone
from tests.conftest import Launcher, SaveModel
from vit.config import load_config
from vit.data.corrections import read_corrections
from vit.data.open import open_dataset
from vit.training.data import build_dataset

# classes and files with names that would be markup, a path or a formula
CLASSES = ("<b>red", '"blue",')
FILE = "{:02d}, <img src=x onerror=alert(1)>.png"
GROUPS = "([0-9])9, <img"
TRAIN = [
    "data.image_size=16", "model.patch_size=8", "model.embed_dim=16", "model.depth=1",
    "model.num_heads=2", "train.epochs=1", "train.batch_size=16", "train.device=cpu",
    "train.precision=float32",
]  # fmt: skip


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Red and blue images; three of the red ones are blue."""
    root = tmp_path_factory.mktemp("audit") / "photos"
    random = np.random.default_rng(0)
    for label, class_name in enumerate(CLASSES):
        (root / class_name).mkdir(parents=True)
        for number in range(20):
            pixels = random.integers(0, 60, (16, 16, 3), dtype=np.uint8)
            is_blue = label == 1 or number < 3
            pixels[..., 2 if is_blue else 0] += 150
            Image.fromarray(pixels).save(root / class_name / FILE.format(number))
    return root


@pytest.fixture(scope="module")
def weights(root: Path, save_model: SaveModel) -> Path:
    return save_model(root.parent / "small.safetensors")


@pytest.fixture(scope="module")
def result(root: Path, weights: Path) -> Any:
    return vit.audit(root, model=weights, group_by=GROUPS)


@pytest.fixture(scope="module")
def page(result: Any, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("page")
    result.save(folder / "audit")
    browser.execute_cdp_cmd(
        "Browser.setDownloadBehavior", {"behavior": "allow", "downloadPath": str(folder)}
    )
    browser.get((folder / "audit" / "audit.html").as_uri())
    browser.folder = folder
    return browser


def test_suspects_stand_between_the_nearest_images_of_both_classes(
    result: Any, root: Path, weights: Path
) -> None:
    audit = result.audit
    # 09 and 19 of both classes are two groups, the others are alone
    assert len(set(result.images.groups)) == 2 + 36
    found = {(error.path, error.given, error.suggested) for error in audit.label_errors}
    assert found == {(f"{CLASSES[0]}/{FILE.format(number)}", *CLASSES) for number in range(3)}
    paths = [f"{name}/{FILE.format(number)}" for name in CLASSES for number in range(20)]
    features = vit.embed(weights, [root / path for path in paths], device="cpu")
    units = features / np.linalg.norm(features, axis=1, keepdims=True)
    cosines = units @ units.T
    for error in audit.label_errors:
        near = audit.neighbours[error.path]
        assert near.keys() == {"given", "suggested"}
        index = paths.index(error.path)
        for side, class_name in (("given", error.given), ("suggested", error.suggested)):
            found = [paths.index(path) for path, _ in near[side]]
            others = [i for i in range(40) if i // 20 == CLASSES.index(class_name) and i != index]
            expected = np.sort(cosines[index, others])[::-1][:5]
            np.testing.assert_allclose(cosines[index, found], expected, atol=1e-5)
            np.testing.assert_allclose([cosine for _, cosine in near[side]], expected, atol=1e-5)
            assert set(found) <= set(others)


def test_the_command_writes_a_page_on_which_names_are_inert(
    result: Any, root: Path, weights: Path, tmp_path: Path, cli: Launcher
) -> None:
    output = ("--output", tmp_path / "out")
    cli.succeed("audit", root, "--model", weights, "--group-by", GROUPS, *output)
    errors = json.loads((tmp_path / "out" / "audit.json").read_text())["label_errors"]
    assert errors[0].keys() == {"path", "given", "suggested", "score"}
    assert [error["path"] for error in errors] == [
        error.path for error in result.audit.label_errors
    ]
    page = (tmp_path / "out" / "audit.html").read_text()
    assert "<b>red" not in page
    assert "<img src=x" not in page
    assert "&lt;b&gt;red" in page
    assert "http" not in page.replace("http-equiv", "").replace("http://www.w3.org", "")
    assert "add --model" in cli.fail("audit", root, "--output", tmp_path / "other")


def test_accepted_suggestions_are_applied_and_change_the_fingerprint(
    root: Path, tmp_path: Path
) -> None:
    path = f"{CLASSES[0]}/{FILE.format(0)}"
    corrections = tmp_path / "corrections.csv"
    with corrections.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(
            [("path", "given", "label"), (path, *CLASSES)]
        )
    files = sorted(map(str, root.rglob("*")))

    before = open_dataset("folder", root=root)
    after = replace(before, corrections=read_corrections(corrections)).split("all")
    (changed,) = np.flatnonzero(before.split("all").labels != after.labels)
    assert after.ids[changed] == path
    assert after.class_names[after.labels[changed]] == CLASSES[1]

    runs = []
    for extra in ([], [f"data.corrections={corrections}"]):
        output = tmp_path / f"run-{len(extra)}"
        runs.append(vit.train(root, output=output, overrides=[*TRAIN, *extra]).bundle)
    plain, corrected = runs
    assert plain.data["fingerprint"] != corrected.data["fingerprint"]
    # the model file doesn't need the table
    assert corrected.config["data"]["corrections"] == {path: CLASSES[1]}
    assert plain.config["data"]["corrections"] is None
    assert sorted(map(str, root.rglob("*"))) == files


def test_corrections_that_do_not_fit_are_refused(root: Path, tmp_path: Path, cli: Launcher) -> None:
    table = tmp_path / "table.csv"
    for text, problem in (
        ("name,label\na,b\n", "line 1 is not path,given,label"),
        ("path,given,label\na.png,b\n", "line 2"),
        ("path,given,label\na,b,c\na,b,d\n", "a second label"),
    ):
        table.write_text(text)
        with pytest.raises(ValueError, match=problem):
            read_corrections(table)
    arguments = ("train", root, *TRAIN, f"data.corrections={table}", "--output", tmp_path / "run")
    for path, problem in (
        ("gone.png", "names 1 images that are not among those"),
        (f"{CLASSES[0]}/{FILE.format(0)}", "unknown label of"),
    ):
        table.write_text(f'path,given,label\n"{path}",a,b\n')
        assert problem in cli.fail(*arguments)


@pytest.mark.browser
def test_accepted_suspects_are_saved(page: Any, result: Any) -> None:
    from selenium.webdriver.common.keys import Keys

    errors = result.audit.label_errors
    assert len(errors) == 3

    def press(*keys: str) -> None:
        for key in keys:
            page.find_element("tag name", "body").send_keys(key)

    def read_progress() -> str:
        return page.find_element("id", "status").text

    assert read_progress() == "0 of 3 decided, 0 accepted"
    # the second is rejected, and left undecided after all
    press("j", "a", "r", "k", "u", "a")
    after_keys = "2 of 3 decided, 2 accepted"
    assert read_progress() == after_keys
    # Chromium's processes exchange what a page stores a moment later
    time.sleep(1)
    page.refresh()
    assert read_progress() == after_keys
    pressed = page.find_elements("css selector", ".suspect button[aria-pressed=true]")
    assert [button.text for button in pressed] == ["Accept a", "Undecided u", "Accept a"]
    # on to the first that is undecided
    press("j")
    current = page.find_element("class name", "current")
    assert current.get_attribute("aria-label") == errors[1].path

    page.find_element("id", "save").send_keys(Keys.ENTER)
    file = page.folder / "corrections.csv"
    for _ in range(100):
        if file.exists():
            break
        time.sleep(0.05)
    expected = {error.path: error.suggested for error in (errors[0], errors[2])}
    assert read_corrections(file) == expected

    # by pointer, in a card that isn't the current one
    page.find_elements("css selector", "button[data-choice=rejected]")[2].click()
    assert read_progress() == "2 of 3 decided, 1 accepted"


@pytest.mark.browser
def test_a_phone_scrolls_down_only(page: Any) -> None:
    with phone(page):
        page.refresh()
        assert find_wide(page) == []
    assert find_low_contrast(page) == []
    assert find_unnamed(page) == []
    assert page.get_log("browser") == []


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A table of images that are red, blue or both, or neither; of two the labels are wrong."""
    root = tmp_path_factory.mktemp("labels")
    random = np.random.default_rng(0)
    rows = []
    for number in range(48):
        pixels = random.integers(0, 40, (16, 16, 3), dtype=np.uint8)
        names = []
        for place, name in ((0, "red"), (2, "blue")):
            if number >> (place // 2) & 1:
                pixels[..., place] += 180
                names.append(name)
        Image.fromarray(pixels).save(root / f"{number:02}.png")
        # the two labels exchanged, and one label missing
        names = {1: ["blue"], 3: ["red"]}.get(number, names)
        rows.append(f"{number:02}.png,{'|'.join(names)}")
    (root / "labels.csv").write_text("\n".join(["path,labels", *rows]))
    return root / "labels.csv"


@pytest.fixture(scope="module")
def audited(labelled: Path, weights: Path) -> Any:
    return vit.audit(labelled, model=weights, task="multilabel")


def test_wrong_and_missing_labels_are_named(audited: Any, labelled: Path, tmp_path: Path) -> None:
    audit = audited.audit
    found = {(error.path, error.given, error.suggested) for error in audit.label_errors}
    assert found == {("01.png", "blue", "red"), ("03.png", "red", "blue|red")}
    assert audit.top1 > 0.9
    for error in audit.label_errors:
        near = audit.neighbours[error.path]
        assert len(near["given"]) == len(near["suggested"]) == 5
        assert error.path not in {path for path, _ in near["given"] + near["suggested"]}
    audited.save(tmp_path / "audit")
    text = (tmp_path / "audit" / "audit.html").read_text()
    assert "48 images of 2 classes" in text
    assert "<strong>red</strong>, or rather <strong>blue|red</strong>?" in text

    # as the page saves them
    corrections = tmp_path / "corrections.csv"
    corrections.write_text("path,given,label\n01.png,blue,red\n03.png,red,red|blue\n")
    config = {
        "data": {
            "name": "folder",
            "root": str(labelled),
            "corrections": str(corrections),
            "task": "multilabel",
        }
    }
    data = load_config({**config, "data": {**config["data"], "image_size": 16}})
    images = build_dataset(data).split("all")
    marks = {name: images.labels[images.ids.index(name)].tolist() for name in ("01.png", "03.png")}
    # the labels are blue and red
    assert marks == {"01.png": [False, True], "03.png": [True, True]}
    corrections.write_text("path,given,label\n01.png,blue,red|green\n")
    with pytest.raises(ValueError, match="'green'; known: blue, red"):
        build_dataset(data).split("all")
