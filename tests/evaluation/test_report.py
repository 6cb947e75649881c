"""The report is one file of modest size that runs no name, and says what went wrong and why."""

import re
from collections.abc import Iterator
from dataclasses import replace
from html import unescape
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.metrics import confusion_matrix

import vit
from tests.browser import find_low_contrast, find_unnamed, find_wide, phone
from tests.evaluation.records import make_evaluation
from vit.bundle import Bundle
from vit.data.dataset import ImageDataset
from vit.data.preprocess import Preprocess
from vit.data.sources.base import ArrayReader
from vit.evaluation.images import EvaluationSet, TrainTestOverlap
from vit.evaluation.metrics import score_logits
from vit.evaluation.report.contrast import SIDE, Contrast, Mistake
from vit.evaluation.report.report import build_report
from vit.evaluation.result import EvaluationResult
from vit.evaluation.subgroups import Subgroup
from vit.explanation.render.page import encode_photo

NASTY = "<img src=x onerror=document.title='owned'>"
NAMES = ("ant", "</script><b>bee", "cat & co", "$dog$")


def make_case(
    count: int, names: tuple[str, ...], *, multilabel: bool = False, side: int = 16
) -> EvaluationResult:
    """An evaluation of noise by a model that knows how sure it may be."""
    rng = np.random.default_rng(0)
    logits = (2 * rng.standard_normal((count, len(names)))).astype(np.float32)
    labels: Any = (logits + rng.gumbel(size=logits.shape)).argmax(axis=1)
    if multilabel:
        labels = logits + rng.logistic(size=logits.shape) > 0
    scores = score_logits(logits, labels)
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
    evaluation = make_evaluation(
        scores,
        names,
        temperature=1.5,
        subgroups={"site": [Subgroup(NASTY, 9, 9, 0.5, (0.1, 0.9))]},
        unreadable=[(NASTY, "broken")],
        duplicates_of_training=TrainTestOverlap(
            exact=1, near=0, examples=[NASTY], accuracy_without=0.5
        ),
        model=NASTY,
        conditions={"device": "cpu", "precision": "float32", "command": f"vit evaluate '{NASTY}'"},
    )
    images = EvaluationSet(dataset, ids, labels, Preprocess((side, side)))
    bundle = Bundle(torch.nn.Linear(1, 1), images.preprocess, names, name=NASTY, sha256="a" * 64)
    if multilabel:
        bundle = replace(bundle, data={"task": "multilabel"})
    return EvaluationResult(evaluation, scores, logits, images, bundle, num_examples=8)


def explain(bundle: Bundle, mistakes: list[Mistake], pixels: Any) -> list[Contrast]:
    answer = None if bundle.is_multilabel else 0
    values = np.random.default_rng(0).normal(size=(4, 4)).astype(np.float32)
    return [Contrast(values, [1, 2], answer) for _ in mistakes]


def build(case: EvaluationResult, *, explain: Any = explain) -> str:
    with patch("vit.evaluation.report.report.explain_mistakes", explain):
        return build_report(case)


@pytest.fixture(scope="module", params=["classes", "labels"])
def case(request: pytest.FixtureRequest) -> EvaluationResult:
    return make_case(300, NAMES, multilabel=request.param == "labels")


@pytest.fixture(scope="module")
def text(case: EvaluationResult) -> str:
    return build(case)


def test_one_file_of_modest_size_without_an_outside_address(text: str) -> None:
    assert "http" not in text.replace('http-equiv="Content-Security-Policy"', "")
    assert not re.search(r"<link[^>]+stylesheet|<script[^>]+src|@import|url\((?!data:|#)", text)
    assert set(re.findall(r'src="(\w+):', text)) == {"data"}
    assert len(text) < 600_000


def test_names_are_text_wherever_they_come_from(text: str) -> None:
    assert "<img src=x" not in text
    assert "</script><b>" not in text
    assert "&lt;img src=x" in text
    assert "cat &amp; co" in text


def test_metrics_and_errors_are_those_of_the_evaluation(case: EvaluationResult, text: str) -> None:
    low, high = case.evaluation.intervals[case.evaluation.headline]
    assert f"{100 * low:.0f}–{100 * high:.0f} %" in text.replace("\u00a0", " ")
    # the worst class or label is the first row, and has the first errors
    (table,) = re.findall(r'aria-label="Each class">.+?</table>', text, re.DOTALL)
    listed = [unescape(name) for name in re.findall("<tr><td>(.+?)</td>", table)]
    rows = case.evaluation.per_class
    assert listed == [
        row.name for row in sorted(rows, key=lambda row: row.average_precision or row.f1)
    ]
    for row in rows:
        missed = row.support - round((row.recall or 0) * row.support)
        assert f": {missed} of {row.support} missed, " in text
    pictures = re.findall(r'<img src="([^"]+)" alt="test/(\d+)\.png"', text)
    for address, number in pictures:
        photo = Image.fromarray(case.images.read(int(number), int(number) + 1)[0])
        assert address == encode_photo(photo, side=SIDE)
    assert len({number for _, number in pictures}) > 4
    # each error has its picture, its map and the photo without the patches that turn the answer
    assert text.count('<div class="error">') == 8
    assert text.count('alt="map of') == text.count("without 2 patches ") == 8


def test_charts_show_the_numbers_of_scikit_learn(case: EvaluationResult, text: str) -> None:
    scores = case.scores
    cells = re.findall(r'<td style="--share: [\d.]+%">(\d*)</td>', text)
    if scores.is_multilabel:
        assert cells == []
        assert text.count("ROC curve: sensitivity") == len(NAMES)
        return
    expected = confusion_matrix(scores.labels, scores.predicted).ravel().tolist()
    assert [int(cell or 0) for cell in cells] == expected


def test_duplicates_are_told_with_what_they_change(case: EvaluationResult, text: str) -> None:
    assert "1 exact, 0 near" in text
    (warning,) = [each for each in case.evaluation.list_warnings() if "in training" in each]
    assert "of the images are right with them and 50 % without" in warning
    unknown = case.evaluation.model_copy(update={"duplicates_of_training": None})
    assert "not known: the model file holds no hashes" in build(replace(case, evaluation=unknown))


def test_a_model_without_maps_has_a_report_that_says_so(case: EvaluationResult) -> None:
    def refuse(*_: Any) -> Any:
        raise ValueError("a ResNet has no attention")

    page = build(case, explain=refuse)
    assert "No maps: a ResNet has no attention" in page
    assert 'alt="map of' not in page
    assert page.count('<div class="error">') == 8


def test_a_report_of_a_model_says_why(tiny_bundle: Bundle) -> None:
    result = vit.evaluate(tiny_bundle, data="digits", num_examples=4)
    page = result.build_files()["report.html"]
    assert isinstance(page, str)
    assert page.count('<div class="error">') == page.count('alt="map of') == 4


# --- in a browser


@pytest.fixture(scope="module")
def page(text: str, browser: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    path = tmp_path_factory.mktemp("report") / "report.html"
    path.write_text(text, encoding="utf-8")
    browser.get(path.as_uri())
    return browser


@pytest.mark.browser
def test_everything_is_named_readable_and_fits_a_phone(page: Any) -> None:
    assert page.title != "owned"
    assert find_unnamed(page) == []
    assert find_low_contrast(page) == []
    with phone(page):
        assert find_wide(page) == []
