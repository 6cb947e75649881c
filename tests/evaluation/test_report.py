"""The report is one file of modest size that runs no name, sorts, and leads from a number to its
images."""

import html
import json
import math
import re
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image

import vit
from tests.browser import find_low_contrast, find_unnamed, find_wide, phone
from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.data.sources.base import ArrayReader
from vit.evaluation.examples import Example, Examples
from vit.evaluation.images import EvaluationSet, TrainTestOverlap
from vit.evaluation.intervals import compute_intervals
from vit.evaluation.label_result import LabelEvaluationResult
from vit.evaluation.metrics import (
    ConfusedPair,
    bin_confidence,
    compute_metrics,
    compute_per_class,
    score_logits,
)
from vit.evaluation.report import report
from vit.evaluation.report.confusion import compute_confusion
from vit.evaluation.report.contrast import ExplainedPair, explain_confusions, find_confused_pairs
from vit.evaluation.report.label_report import build_label_report
from vit.evaluation.report.plain import describe_in_plain_words
from vit.evaluation.report.report import (
    DrawnMap,
    DrawnMaps,
    build_report,
    load_history,
)
from vit.evaluation.result import Cost, Evaluation, EvaluationResult
from vit.explanation.methods.registry import METHODS
from vit.explanation.records import Explanations
from vit.explanation.render.page import encode_picture
from vit.explanation.training_photos import Neighbour, TrainingPhotos
from vit.prediction.conformal import SetMetrics
from vit.prediction.predictor import Pixels
from vit.prediction.records import Prediction, PredictionResult

NASTY = "<img src=x onerror=document.title='owned'>"
NAMES = ("ant", "</script><b>bee", "cat & co", "dog")


def make_case(count: int, names: tuple[str, ...], *, side: int, examples: int) -> EvaluationResult:
    rng = np.random.default_rng(0)
    logits = 2 * rng.standard_normal((count, len(names)))
    labels = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    scores = score_logits(logits.astype(np.float32), labels)
    ids = (*(f"test/{index:05d}.png" for index in range(count - 1)), f"test/{NASTY}.png")
    pixels = rng.integers(0, 256, (count, side, side, 3), dtype=np.uint8)
    dataset = ImageDataset(
        name="made up",
        split="test",
        class_names=names,
        labels=labels,
        ids=ids,
        reader=ArrayReader(pixels),
        pixels=pixels,
        hashes=np.stack([np.arange(count), np.zeros(count, int)]).astype(np.uint64),
    )

    def describe(indices: Any) -> list[Example]:
        return [
            Example(
                ids[i],
                names[labels[i]],
                names[scores.predicted[i]],
                float(scores.confidence[i]),
                float(scores.label_probability[i]),
            )
            for i in indices
        ]

    metrics = compute_metrics(scores)
    wrong = np.flatnonzero(~scores.correct)
    evaluation = Evaluation(
        **metrics,
        intervals=compute_intervals(scores),
        per_class=compute_per_class(scores, names),
        reliability=bin_confidence(scores.confidence, scores.correct),
        temperature=1.5,
        prediction_sets=[
            SetMetrics(0.9, 100, 0.912, 0.604, 0.971, 1.42),
            SetMetrics(0.95, 100, 0.961, 0.302, 1.0, 2.31),
        ],
        num_images=count,
        num_groups=count,
        unreadable=[(NASTY, "broken")],
        duplicates_of_training=TrainTestOverlap(
            exact=1, near=0, examples=[NASTY], top1_without=0.5
        ),
        examples=Examples(
            most_confident_errors=describe(wrong[np.argsort(-scores.confidence[wrong])][:examples]),
            least_confident_correct=describe([count - 1]),
            label_errors=[],
            num_label_errors=0,
        ),
        cost=Cost(1000, 2_000_000, 1234.5),
        data="made up",
        split="test",
        notes=[],
        fingerprint="f" * 64,
        model=NASTY,
        model_sha256="a" * 64,
        recipe="b" * 64,
        seed=3,
        conditions={"device": "cpu", "precision": "float32", "command": f"vit evaluate '{NASTY}'"},
    )
    images = EvaluationSet(dataset, ids, labels, Preprocess((side, side)))
    # a model file that names no training photos
    bundle = Bundle(torch.nn.Linear(1, 1), images.preprocess, names, name=NASTY, sha256="a" * 64)
    return EvaluationResult(evaluation, scores, images, bundle, logits.astype(np.float32))


# as long as real ones
SENTENCES = [
    f"It fails most on {NAMES[1]}: 29 of 71 images are recognised, as a long sentence says it may be.",
    "It can decide 62 % of the images alone, 97 % of them correctly. For the others it names several.",
    "Possible problems in the data: 3 of 300 labels look wrong, 1 images are in training, 1 can't be read.",
]


def draw_red(pictures: list[Pixels]) -> DrawnMaps:
    overlay = encode_picture(Image.new("RGB", (64, 64), "red"))
    maps = [DrawnMap(overlay, "confirmed") for _ in pictures]
    return DrawnMaps(METHODS["libra-removal"], maps)


def build(
    case: EvaluationResult,
    *,
    history: list[dict[str, Any]] | None = None,
    explain: Callable = draw_red,
    contrasts: list[ExplainedPair] | None = None,
) -> str:
    sentences = [case.evaluation.describe_guessing(), *SENTENCES]
    with (
        patch("vit.evaluation.report.report.load_history", return_value=history or []),
        patch("vit.evaluation.report.report.explain_confusions", lambda *_, **__: contrasts or []),
        patch("vit.evaluation.report.report.describe_in_plain_words", return_value=sentences),
        patch(
            "vit.evaluation.report.report.draw_maps",
            lambda bundle, pictures, _, **__: explain(pictures),
        ),
    ):
        return build_report(case)


@pytest.fixture(scope="module")
def case() -> EvaluationResult:
    return make_case(300, NAMES, side=16, examples=5)


HISTORY = [
    {"epoch": 1, "train_loss": 2.0, "val_loss": 1.8, "val_top1": 0.4},
    {"epoch": 2, "train_loss": 1.0, "val_loss": None, "val_top1": None},
    {"epoch": 3, "train_loss": 0.5, "val_loss": 0.9, "val_top1": 0.7},
]


def test_one_file_without_an_outside_address(case: EvaluationResult) -> None:
    page = build(case, history=HISTORY)
    assert "http" not in page.replace('http-equiv="Content-Security-Policy"', "")
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src|@import|url\((?!data:)", page)
    assert set(re.findall(r'src="(\w+):', page)) == {"data"}


def test_names_are_text_wherever_they_come_from(case: EvaluationResult) -> None:
    page = build(case)
    assert "<img src=x" not in page
    assert "</script><b>" not in page
    assert "&lt;img src=x" in page
    assert "cat &amp; co" in page


def test_metrics_are_those_of_the_evaluation(case: EvaluationResult) -> None:
    page = build(case)
    low, high = case.evaluation.intervals["top1"]
    assert f"{100 * case.evaluation.top1:.0f} %" in page
    assert f"{100 * low:.0f}–{100 * high:.0f} %" in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page, re.DOTALL).group(1))  # type: ignore[union-attr]
    assert data["counts"] == compute_confusion(case.scores).tolist()
    for key, images in data["cells"].items():
        row, column = map(int, key.split(","))
        assert len(images) == min(data["counts"][row][column], 100)
        confidences = [confidence for _, confidence, _ in images]
        assert confidences == sorted(confidences, reverse=True)
    errors = np.array(data["counts"])
    np.fill_diagonal(errors, 0)
    row, column = np.unravel_index(errors.argmax(), errors.shape)
    pair = f"{NAMES[row]} predicted as {NAMES[column]} ({errors[row, column]})"
    assert f"Most frequent errors: {html.escape(pair)}" in page
    for order in data["orders"].values():
        assert sorted(order) == list(range(len(NAMES)))


def test_a_model_without_maps_has_a_report_that_says_so(case: EvaluationResult) -> None:
    def refuse(pictures: list[Pixels]) -> DrawnMaps:
        raise ValueError("a ResNet has no attention")

    page = build(case, explain=refuse)
    assert "No maps: a ResNet has no attention" in page
    assert 'alt="map of' not in page


def test_maps_take_no_longer_than_they_may(tiny_bundle: Bundle) -> None:
    """A clock on which four maps take 4 seconds, and their tests 20."""
    now = 0.0

    def take(function: Callable, seconds: float) -> Callable:
        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal now
            now += seconds
            return function(*arguments, **options)

        return call

    side = tiny_bundle.preprocess.image_size[0]
    pictures = list(np.random.default_rng(0).integers(0, 256, (12, side, side, 3), np.uint8))
    counts = []
    with (
        patch.object(report, "read_work_clock", lambda _: now),
        patch.object(report, "compute_maps", take(report.compute_maps, 4)),
        patch.object(report, "check_maps", take(report.check_maps, 20)),
    ):
        for seconds in (1e9, 40, 27, 3):
            drawn = report.draw_maps(tiny_bundle, pictures, now + seconds)
            tested = [map.verdict for map in drawn.maps if map.verdict]
            counts.append((len(drawn.maps), len(tested)))
            text = report.describe_maps(drawn, len(pictures))
            assert ("Of 12 pictures," in text) == (counts[-1] != (12, 12))
    # tests stop while there is time to draw the other maps
    assert counts == [(12, 12), (12, 4), (4, 4), (4, 0)]


def test_the_work_of_an_evaluation_is_that_of_its_device(tiny_bundle: Bundle) -> None:
    """Maps may take as much: time in which other programs run doesn't count."""
    count = iter(range(9))
    images = np.zeros((4, 8, 8, 3), np.uint8), np.arange(4)
    with patch(
        "vit.evaluation.evaluate.read_work_clock", lambda device: {"cpu": next(count)}[device]
    ):
        assert vit.evaluate(tiny_bundle, dataset=images, device="auto").seconds == 1


def test_a_nearly_even_map_is_not_drawn() -> None:
    photo = np.zeros((16, 16, 3), np.uint8)
    values = np.ones((4, 4), np.float32)
    values[0, 0] = 1.1
    assert report._draw_map(photo, values, METHODS["rollout"]) is None
    values[0, 0] = 3
    assert report._draw_map(photo, values, METHODS["rollout"])
    drawn = DrawnMaps(METHODS["rollout"], [DrawnMap(None, "not confirmed"), DrawnMap("x", None)])
    assert "nearly even are not drawn (1)" in report.describe_maps(drawn, 2)


def test_a_model_that_may_guess_judges_no_label(case: EvaluationResult) -> None:
    suspects = replace(
        case.evaluation.examples,
        label_errors=case.evaluation.examples.most_confident_errors[:2],
        num_label_errors=2,
    )
    for low, judges in ((0.5, True), (0.2, False)):
        intervals = case.evaluation.intervals | {"top1": (low, 0.9)}
        evaluation = case.evaluation.model_copy(
            update={"intervals": intervals, "examples": suspects}
        )
        result = replace(case, evaluation=evaluation)
        sentences = " ".join(describe_in_plain_words(result))
        assert ("2 of 300 labels look wrong" in sentences) == judges
        page = build(result)
        assert ("2 in total" in page) == judges
        assert ("may be guessing can" in page) != judges


def test_no_card_says_what_another_says(case: EvaluationResult) -> None:
    def titles(evaluation: Evaluation) -> list[str]:
        page = build(replace(case, evaluation=evaluation))
        cards = re.findall(r'<div class="card"><p>(.*?)</p>', page)
        assert len(set(cards)) == len(cards) == 3
        table = page.partition('id="metrics"')[2].partition("</details>")[0]
        return re.findall(r"<tr><td>(.*?)<br>", table)

    every = titles(case.evaluation)
    assert "Top-5 accuracy" not in every  # of four classes
    assert {"Top-1 accuracy", "Macro recall", "Negative log-likelihood", "Loss"} < set(every)
    assert "Negative log-likelihood" not in titles(
        case.evaluation.model_copy(update={"temperature": 1.0})
    )
    balanced = [replace(each, support=75) for each in case.evaluation.per_class]
    assert "Macro recall" not in titles(case.evaluation.model_copy(update={"per_class": balanced}))


def test_the_title_names_the_run_and_the_data_set(case: EvaluationResult) -> None:
    for model in ("/home/me/runs/first", "runs/first/model.safetensors"):
        update = {"model": model, "data": "holiday photos"}
        page = build(replace(case, evaluation=case.evaluation.model_copy(update=update)))
        assert "<title>first on holiday photos</title>" in page
        assert "<h1>first on holiday photos: 300 images (test), 4 classes</h1>" in page


def test_a_thousand_classes_stay_small() -> None:
    names = tuple(f"class {index}" for index in range(1000))
    page = build(make_case(5000, names, side=32, examples=16), history=HISTORY)
    assert len(page.encode()) < 5_000_000


@pytest.mark.extended
def test_fifty_thousand_predictions_and_64_pictures_stay_small_and_quick() -> None:
    names = tuple(f"class {index}" for index in range(100))
    case = make_case(50_000, names, side=64, examples=64)
    start = time.perf_counter()
    page = build(case, history=HISTORY)
    assert time.perf_counter() - start < 20
    assert len(page.encode()) < 10_000_000
    assert "Shown are the 40 of 100 classes with the most errors" in page


def test_history_is_found_beside_the_model_and_a_torn_line_ends_it(tmp_path: Path) -> None:
    assert load_history(str(tmp_path)) == []
    assert load_history("timm:vit_tiny_patch16_224") == []
    (tmp_path / "metrics.jsonl").write_text(
        '{"epoch": 1, "step": 5}\n{"epoch": 2, "step": 10}\n{"epo'
    )
    assert load_history(str(tmp_path / "model.safetensors")) == [
        {"epoch": 1, "step": 5},
        {"epoch": 2, "step": 10},
    ]


def make_pair(label: int, predicted: int) -> ExplainedPair:
    picture = encode_picture(Image.new("RGB", (64, 64), "red"))
    error = {
        "path": NASTY,
        "probability": 0.9,
        "is_suspect": True,
        "photo": picture,
        "maps": [("libra-fullgrad", picture), ("removal-gradient", picture)],
        "num_removed": 2,
        "removed": picture,
        "answer": label,
        "neighbours": [
            Neighbour(NASTY, NAMES[label], 0.9, picture),
            Neighbour(NASTY, NAMES[predicted], 0.8, None),
        ],
    }
    return ConfusedPair(label, predicted, 5), [error]


def test_pairs_are_those_that_are_confused_more_than_chance(case: EvaluationResult) -> None:
    """Of 30 errors of class 0, 20 are class 1; those of class 2 are spread evenly."""
    labels = np.repeat([0, 0, 0, 2, 2, 2], [20, 5, 5, 4, 4, 4])
    predicted = np.repeat([1, 2, 3, 0, 1, 3], [20, 5, 5, 4, 4, 4])
    scores = score_logits(np.eye(4, dtype=np.float32)[predicted], labels)
    (pair,) = find_confused_pairs(scores)
    assert (pair.label, pair.predicted, pair.count) == (0, 1, 20)
    # of two classes there is no other to be confused with
    pairs = find_confused_pairs(score_logits(np.eye(2, dtype=np.float32)[[0, 0]], np.array([0, 1])))
    assert [(pair.label, pair.predicted) for pair in pairs] == [(1, 0)]
    assert find_confused_pairs(case.scores.subset(case.scores.correct)) == []


def test_a_report_of_a_model_says_why_and_in_plain_words(tiny_bundle: Bundle) -> None:
    result = vit.evaluate(tiny_bundle, data="digits", num_examples=4)
    assert 0 < result.seconds < 600
    # by default fewer images are explained on a slow machine
    result = replace(result, seconds=math.inf)
    training_photos = TrainingPhotos(tiny_bundle, side=64, splits=result.images.splits)
    pairs = explain_confusions(result, training_photos, seconds=math.inf)
    assert pairs
    confusion = compute_confusion(result.scores)
    for pair, explained_errors in pairs:
        assert confusion[pair.label, pair.predicted] == pair.count
        assert 1 <= len(explained_errors) <= 3
        for error in explained_errors:
            assert (error["removed"] is None) == (error["num_removed"] == 0)
            # its training photos are at hand
            classes = [tiny_bundle.class_names[index] for index in (pair.label, pair.predicted)]
            assert [neighbour.class_name for neighbour in error["neighbours"]] == classes
            assert all(neighbour.picture for neighbour in error["neighbours"])
    # one error in no time
    ((_, [_]),) = explain_confusions(result, training_photos, seconds=0)
    page = build_report(result)
    errors = result.evaluation.examples.most_confident_errors
    for error in errors:
        assert f'aria-label="Nearest training photos of {error.path}"' in page
    # each training photo is drawn once, and written wherever it is near
    assert page.count('<ul class="neighbours"') == len(errors) == 4
    assert page.count('alt="training photo digits/') == 3 * 4 + 2 * sum(
        len(explained_errors) for _, explained_errors in pairs
    )
    sentences = describe_in_plain_words(result)
    assert sentences[0] == result.evaluation.describe_guessing()
    assert sentences[1].startswith("It fails most on")


def test_what_is_not_known_of_the_data_is_said(case: EvaluationResult) -> None:
    evaluation = case.evaluation.model_copy(update={"unreadable": []})

    def describe(overlap: TrainTestOverlap | None, *, is_guessing: bool) -> str:
        with patch.object(Evaluation, "beats_guessing", lambda _: not is_guessing):
            described = evaluation.model_copy(update={"duplicates_of_training": overlap})
            return describe_in_plain_words(replace(case, evaluation=described))[-1]

    none = replace(case.evaluation.duplicates_of_training, exact=0)
    start = "No problems found in the data: no"
    assert describe(none, is_guessing=False) == (
        f"{start} suspicious label or training image or unreadable file."
    )
    unknown = "Whether the model was trained on some of the images isn't known."
    text = f"{start} suspicious label or unreadable file. {unknown}"
    assert describe(None, is_guessing=False) == text
    assert describe(None, is_guessing=True) == (
        f"{start} unreadable file. Labels can't be checked by a model that may be guessing. {unknown}"
    )
    assert describe(case.evaluation.duplicates_of_training, is_guessing=False) == (
        "Possible problems in the data: 1 images are the same as in training, or nearly."
    )


# --- in a browser
# ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def page(case: EvaluationResult, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("report") / "report.html"
    contrasts = [make_pair(0, 1), make_pair(2, 3)]
    path.write_text(build(case, history=HISTORY, contrasts=contrasts), encoding="utf-8")
    browser.get(path.as_uri())
    return browser


def texts(page: Any, selector: str) -> list[str]:
    found: list[str] = page.execute_script(
        "return [...document.querySelectorAll(arguments[0])].map(element => element.textContent)",
        selector,
    )
    return found


@pytest.mark.browser
def test_a_click_on_a_heading_sorts_and_a_second_turns_it_round(
    page: Any, case: EvaluationResult
) -> None:
    button = page.find_element("css selector", "#classes th:nth-child(3) button")
    recalls = {row.name: row.recall for row in case.evaluation.per_class}
    button.click()
    names = texts(page, "#classes tbody td:first-child")
    assert [recalls[name] for name in names] == sorted(recalls.values(), reverse=True)
    button.click()
    assert texts(page, "#classes tbody td:first-child") == names[::-1]
    assert (
        page.find_element("css selector", "#classes th:nth-child(3)").get_attribute("aria-sort")
        == "ascending"
    )
    page.find_element("css selector", "#classes th:first-child button").click()
    assert texts(page, "#classes tbody td:first-child") == sorted(NAMES)


@pytest.mark.browser
def test_the_matrix_reorders_rows_and_columns_together(page: Any, case: EvaluationResult) -> None:
    confusion = compute_confusion(case.scores)
    select = page.find_element("id", "order")
    for option in select.find_elements("tag name", "option"):
        option.click()
        names = texts(page, "#matrix tbody th")
        assert texts(page, "#matrix thead span") == names
        shown = [
            [int(text or 0) for text in texts(page, f"#matrix tbody tr:nth-child({row}) td")]
            for row in (1, 2, 3, 4)
        ]
        order = [NAMES.index(name) for name in names]
        assert np.array_equal(shown, confusion[np.ix_(order, order)])


@pytest.mark.browser
def test_a_click_on_a_number_shows_its_images(page: Any, case: EvaluationResult) -> None:
    confusion = compute_confusion(case.scores)
    page.find_element("css selector", '[data-cell="0,1"]').click()
    assert texts(page, "#images h3") == [f"ant predicted as {NAMES[1]}: {confusion[0, 1]}"]
    items = page.find_elements("css selector", "#images li")
    assert len(items) == confusion[0, 1]
    picture = items[0].find_element("tag name", "img")
    assert page.execute_script("return arguments[0].naturalWidth", picture) == 16
    chosen = (case.scores.labels == 0) & (case.scores.predicted == 1)
    best = np.flatnonzero(chosen)[case.scores.confidence[chosen].argmax()]
    name = items[0].find_element("css selector", ".file")
    assert name.get_attribute("title") == case.images.ids[best]
    page.find_element("css selector", '[data-cell="0,1"]').click()
    assert not page.find_element("id", "images").is_displayed()


@pytest.mark.browser
def test_a_click_on_a_number_says_why(page: Any) -> None:
    button = page.find_element("css selector", '[data-cell="2,3"]')
    contrast = page.find_element("id", "contrast-2-3")
    assert not contrast.find_element("tag name", "img").is_displayed()
    button.click()
    assert page.find_element("css selector", "#images details") == contrast
    assert contrast.find_element("tag name", "img").is_displayed()
    page.find_element("css selector", '[data-cell="0,1"]').click()
    assert len(page.find_elements("css selector", "#images details")) == 1
    page.find_element("css selector", '[data-cell="0,1"]').click()
    assert len(page.find_elements("css selector", "#contrasts details")) == 2


@pytest.mark.browser
def test_a_wide_matrix_says_that_it_scrolls(
    page: Any, case: EvaluationResult, tmp_path: Path
) -> None:
    from selenium.webdriver.support.wait import WebDriverWait

    assert not page.find_element("id", "wide").is_displayed()  # four classes
    wide = make_case(2000, tuple(f"class {index}" for index in range(60)), side=16, examples=1)
    (tmp_path / "wide.html").write_text(build(wide), encoding="utf-8")
    before = page.current_url
    page.get((tmp_path / "wide.html").as_uri())
    assert page.find_element("id", "wide").is_displayed()
    scroller = page.find_element("css selector", "[aria-label='Confusion matrix']")
    cut = "return [arguments[0].tabIndex, getComputedStyle(arguments[0]).maskImage]"
    assert (shown := page.execute_script(cut, scroller))[0] == 0
    assert "gradient" in shown[1]
    page.execute_script("arguments[0].scrollLeft = 1e6", scroller)
    WebDriverWait(page, 5).until(
        lambda _: page.execute_script(cut, scroller)[1] == "none"
    )  # nothing is left
    page.get(before)


@pytest.mark.browser
def test_text_is_legible_everywhere(page: Any) -> None:
    assert find_low_contrast(page) == []
    assert find_unnamed(page) == []


@pytest.mark.browser
def test_the_theme_switches_and_both_are_legible(page: Any) -> None:
    def contrast() -> float:
        colours = page.execute_script(
            "const style = getComputedStyle(document.body); return [style.color, style.backgroundColor]"
        )
        light = [
            luminance([int(part) for part in re.findall(r"\d+", colour)[:3]]) for colour in colours
        ]
        return (max(light) + 0.05) / (min(light) + 0.05)

    backgrounds = set()
    for _ in range(2):
        assert contrast() > 7
        backgrounds.add(
            page.execute_script("return getComputedStyle(document.body).backgroundColor")
        )
        page.find_element("id", "theme").click()
    assert len(backgrounds) == 2


def luminance(colour: list[int]) -> float:
    """Relative luminance of an sRGB colour (WCAG 2)."""
    linear = [c / 3294.6 if c <= 10 else ((c / 255 + 0.055) / 1.055) ** 2.4 for c in colour]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.browser
def test_a_phone_scrolls_down_only_and_nothing_failed(page: Any, tmp_path: Path) -> None:
    with phone(page):
        page.refresh()
        cards = page.execute_script(
            "return document.querySelector('.cards').getBoundingClientRect().bottom"
        )
        page.save_screenshot(str(tmp_path / "phone.png"))
        assert find_wide(page) == []
        log = page.get_log("browser")
        # ten classes with long names, and percents with a decimal
        names = tuple(f"Staffordshire_bullterrier_{index}" for index in range(10))
        (tmp_path / "long.html").write_text(build(make_case(2000, names, side=8, examples=1)))
        before, title = page.current_url, page.title
        page.get((tmp_path / "long.html").as_uri())
        assert find_wide(page) == []
        page.get(before)
    assert cards <= 500
    with Image.open(tmp_path / "phone.png") as picture:
        assert len(np.unique(np.asarray(picture.convert("L")))) > 50  # something is drawn
    assert title.startswith("<img src=x")  # the name, shown and not run
    assert log == []


def evaluate_labels() -> LabelEvaluationResult:
    """An untrained model of several labels on 40 images; no image has the last label."""
    torch.manual_seed(0)
    sizes = {"img_size": 16, "patch_size": 4, "embed_dim": 16, "depth": 1, "num_heads": 2}
    bundle = Bundle.from_model(
        vit.VisionTransformer(num_classes=4, **sizes),
        class_names=NAMES,
        preprocess=Preprocess((16, 16)),
    )
    random = np.random.default_rng(0)
    pixels = random.integers(0, 256, (40, 16, 16, 3), dtype=np.uint8)
    marks = (random.random((40, 4)) < (0.3, 0.5, 0.2, 0)).astype(int)
    result = vit.evaluate(
        replace(bundle, data={"task": "multilabel"}), dataset=(pixels, marks), class_names=NAMES
    )
    assert isinstance(result, LabelEvaluationResult)
    return result


@pytest.mark.browser
def test_a_report_of_labels_has_their_rows_and_errors(browser: Any, tmp_path: Path) -> None:
    result = evaluate_labels()
    page = build_label_report(result)
    assert "http:" not in page.replace("http://www.w3.org", "")
    assert "<b>bee" not in page
    assert page.count('class="interval"') == 3  # the last label has no average precision
    scores = result.scores
    for place, name in enumerate(NAMES[:3]):
        missed = int((scores.labels & ~scores.predicted)[:, place].sum())
        false = int((scores.predicted & ~scores.labels)[:, place].sum())
        support = int(scores.labels[:, place].sum())
        said = f"{name}: {missed} of {support} missed, {false} falsely found"
        assert html.escape(said).replace("&#x27;", "&#39;") in page
    assert "<img" in page
    assert "<img" not in build_label_report(replace(result, num_examples=0))
    (tmp_path / "labels.html").write_text(page, encoding="utf-8")
    browser.get((tmp_path / "labels.html").as_uri())
    browser.execute_script("document.querySelectorAll('details').forEach(each => each.open = true)")
    assert find_low_contrast(browser) == []
    assert find_unnamed(browser) == []
    with phone(browser):
        browser.refresh()
        assert find_wide(browser) == []
    assert browser.get_log("browser") == []


def test_a_result_shows_itself_in_a_line_and_in_a_notebook_as_a_table(
    case: EvaluationResult, tiny_bundle: Bundle
) -> None:
    assert "\n" not in repr(case)
    assert len(repr(case)) < 200
    assert f"top1={case.evaluation.top1:.4f}" in repr(case)
    page = case._repr_html_()
    for row in case.evaluation.list_rows():
        assert f"<tr><td>{row.title}<td>{row.value}<td>{row.interval}" in page
    assert len(page) < 2000
    assert repr(case.evaluation) == str(case.evaluation) == repr(case).replace("Result", "")
    assert case.evaluation._repr_html_() == page
    assert repr(PredictionResult([Prediction("a.png", [], error="broken")])) == (
        "PredictionResult(1 images, 1 unreadable)"
    )
    explanations = Explanations(tiny_bundle, ["rollout"], [], [("a.png", "broken")])
    assert repr(explanations) == "Explanations(0 images by rollout; 1 could not be read)"


def test_a_class_without_images_has_no_numbers() -> None:
    names = ("ant", "bee", *(f"class {index}" for index in range(40)))
    result = make_case(12, names, side=8, examples=2)
    page = build(result)
    rows = re.findall(r"<tr><td>([^<]+)</td>(.*?)</tr>", page)
    cells = {name: re.findall(r"<td[^>]*>([^<]*)</td>", row) for name, row in rows}
    for row in result.evaluation.per_class:
        shown = cells[row.name]
        assert (shown[:3] == ["–"] * 3) == (row.support == 0), row.name
        assert shown[3] == str(row.support)
