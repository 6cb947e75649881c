"""What grows with the images, the classes and the tokens grows no faster than it must: numbers of
operations and bytes at one size and at twice or ten times that. Times are in
research/growth.py."""

import sys
import tracemalloc
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tests.evaluation.test_report import build, make_case
from tests.explanation.collector import explain_with
from tests.explanation.test_gallery import make_bundle, make_items
from vit.analysis.compare.comparison import _find_recall_changes
from vit.data.dataset import ImageDataset
from vit.data.duplicates import find_duplicates
from vit.data.open import _choose_stratified
from vit.data.sources import folders, tables
from vit.data.sources.base import ArrayReader
from vit.evaluation import metrics
from vit.evaluation.calibration import fit_temperature
from vit.evaluation.metrics import (
    Scores,
    compute_confusion,
    find_label_errors,
    plot_confusion,
    score_logits,
)
from vit.evaluation.report import confusion
from vit.explanation import writer
from vit.explanation.capture import layers
from vit.explanation.capture.forward import run_forward
from vit.explanation.capture.layers import AttentionLayer
from vit.explanation.methods import removal
from vit.explanation.records import ImageResult
from vit.explanation.render import token_details
from vit.options import ExplainOptions


def peak_bytes(function: Callable[[], object]) -> int:
    """What a function allocates at once, in Python and numpy."""
    tracemalloc.start()
    try:
        function()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def count_calls(function: Callable[[], object]) -> int:
    """Functions called, of Python and of C."""
    calls = [0]

    def count(frame: Any, event: str, argument: Any) -> None:
        calls[0] += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls[0]


class Name(str):
    """A text that counts how often it is compared."""

    compared = 0
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        Name.compared += 1
        return str.__eq__(self, other)


def count_comparisons(function: Callable[[], object]) -> int:
    Name.compared = 0
    function()
    return Name.compared


def make_scores(count: int, num_classes: int) -> Scores:
    """Three of four images correct."""
    random = np.random.default_rng(0)
    labels = random.integers(num_classes, size=count)
    predicted = np.where(
        random.random(count) < 0.75, labels, random.integers(num_classes, size=count)
    )
    values = random.random(count)
    return Scores(
        labels,
        predicted,
        confidence=values,
        label_probability=values,
        loss=values,
        nll=values,
        brier=values,
        rank=np.where(labels == predicted, 0, 1),
        num_classes=num_classes,
        temperature=1.0,
    )


def make_source(count: int, num_classes: int, name: Callable[[str], str] = str) -> ImageDataset:
    return ImageDataset(
        name="made up",
        class_names=tuple(name(f"class {index}") for index in range(num_classes)),
        labels=np.random.default_rng(0).integers(num_classes, size=count),
        ids=[f"{index}.png" for index in range(count)],
        reader=ArrayReader(np.zeros((count, 1, 1, 3), np.uint8)),
    )


# --- classes
# -----------------------------------------------------------------------------------------------


def test_confusion_takes_no_square_of_the_classes() -> None:
    images: Any = SimpleNamespace(
        ids=[str(index) for index in range(5000)], read=lambda i, j: np.zeros((1, 8, 8, 3))
    )

    def measure(num_classes: int) -> int:
        scores, names = make_scores(5000, num_classes), tuple(map(str, range(num_classes)))
        images.read = lambda start, stop: np.zeros((1, 8, 8, 3), np.uint8)
        return peak_bytes(
            lambda: (
                confusion.describe_confusion(scores, names, images),
                plot_confusion(scores, class_names=names),
            )
        )

    measure(2000)  # what is imported
    assert (
        measure(20_000) < 1.5 * measure(2000) < 200e6
    )  # the whole matrix of 20,000 classes: 3.2 GB


def test_groups_of_classes_are_those_of_the_whole_matrix() -> None:
    scores = make_scores(3000, 40)
    whole = compute_confusion(scores)
    grouped = compute_confusion(scores, group=7)
    edges = range(0, 40, 7)
    assert np.array_equal(
        grouped, np.add.reduceat(np.add.reduceat(whole, edges, axis=0), edges, axis=1)
    )


@pytest.mark.parametrize("use", ["scores", "label errors", "temperature"])
def test_logits_are_scored_a_few_rows_at_a_time(use: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_CHUNK_LOGITS", 2**16)

    def measure(count: int) -> int:
        random = np.random.default_rng(0)
        logits = random.standard_normal((count, 2000)).astype(np.float32)
        labels = random.integers(2000, size=count)
        scores = make_scores(count, 2000)
        uses: dict[str, Callable[[], object]] = {
            "scores": lambda: score_logits(logits, labels),
            "label errors": lambda: find_label_errors(logits, scores),
            "temperature": lambda: fit_temperature(logits, labels),
        }
        uses[use]()  # what is imported at the first use isn't counted
        return peak_bytes(uses[use])

    assert measure(400) < 1.2 * measure(200)


def test_rows_of_many_classes_are_scored_as_those_of_few(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    logits, labels = (
        random.standard_normal((500, 30)).astype(np.float32),
        random.integers(30, size=500),
    )
    whole, temperature = score_logits(logits, labels), fit_temperature(logits, labels)
    monkeypatch.setattr(metrics, "_CHUNK_LOGITS", 7 * 30)
    parts = score_logits(logits, labels)
    for name in ("predicted", "confidence", "loss", "nll", "brier", "rank"):
        assert np.array_equal(getattr(whole, name), getattr(parts, name))
    assert fit_temperature(logits, labels) == temperature


def test_a_held_out_split_takes_no_pass_for_each_class() -> None:
    few, many = make_source(4000, 20), make_source(4000, 2000)
    assert count_calls(lambda: _choose_stratified(many, 0.2, salt="0:test")) < 1.1 * count_calls(
        lambda: _choose_stratified(few, 0.2, salt="0:test")
    )


def test_choosing_classes_compares_each_name_once() -> None:
    def measure(count: int) -> int:
        source, wanted = (
            make_source(count, count, Name),
            [Name(f"class {index}") for index in range(count)],
        )
        return count_comparisons(lambda: source.keep_classes(wanted))

    assert measure(800) < 2.5 * measure(400) < 10_000


def test_splits_of_a_folder_compare_each_class_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for split in ("train", "val"):
        (tmp_path / split).mkdir()

    def measure(count: int) -> int:
        monkeypatch.setattr(
            folders, "list_classes", lambda folder: [Name(f"class {i}") for i in range(count)]
        )
        return count_comparisons(lambda: folders.find_class_folders("folder", tmp_path, None))

    assert measure(800) < 2.5 * measure(400) < 10_000


def test_one_long_class_name_costs_no_more_than_itself(tmp_path: Path) -> None:
    names = ["cat", "dog", "x" * 20_000]
    (tmp_path / "labels.csv").write_text(
        "path,label\n" + "".join(f"{i}.png,{names[i % 2 if i else 2]}\n" for i in range(600))
    )
    for index in range(600):
        (tmp_path / f"{index}.png").touch()
    source = tables.find_tables(tmp_path, [tmp_path / "labels.csv"], None, allow_outside=False)
    assert peak_bytes(lambda: source.load("train")) < 2e6  # 600 texts as long as the longest: 48 MB
    labels, values = (
        [names[index % 2 if index else 2] for index in range(600)],
        np.random.default_rng(0).random(600),
    )
    assert peak_bytes(lambda: _find_recall_changes(labels, values, values[::-1])) < 2e6


def test_a_report_of_many_classes_shows_the_worst_of_them() -> None:
    names = tuple(f"class {index}" for index in range(1500))
    case = make_case(1500, names, side=8, examples=1)
    page = build(case)
    assert "Shown are the 1,000 of 1,500 classes with the lowest F1" in page
    rows = page.count("<tr><td>class ")
    assert rows == 1000
    assert len(page) < 4e6


# --- images
# ------------------------------------------------------------------------------------------------


def count_compared(monkeypatch: pytest.MonkeyPatch, function: Callable[[], object]) -> int:
    """Pairs of hashes that are compared, and hashes that are looked at by themselves."""
    counted, count = np.bitwise_count, [0]

    def watch(values: np.ndarray) -> np.ndarray:
        count[0] += values.size
        return counted(values)

    with monkeypatch.context() as patch:
        patch.setattr(np, "bitwise_count", watch)
        function()
    return count[0]


def test_copies_of_one_image_are_compared_once(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    few = random.integers(0, 2**63, 10, dtype=np.uint64)
    training = random.integers(0, 2**63, 5000, dtype=np.uint64), few[random.integers(10, size=5000)]
    queries = (
        random.integers(0, 2**63, 5000, dtype=np.uint64),
        few[random.integers(10, size=5000)] ^ np.uint64(1),
    )
    compared = count_compared(
        monkeypatch, lambda: find_duplicates(np.stack(queries), np.stack(training))
    )
    assert compared < 3 * 5000  # all copies with one another: 2.5 million
    near = find_duplicates(np.stack(queries), np.stack(training)).near
    assert near[:, 0].tolist() == list(range(5000))
    first = [
        int(np.flatnonzero(training[1] == query ^ np.uint64(1))[0]) for query in queries[1][:50]
    ]
    assert near[:50, 1].tolist() == first  # of equally close ones the first


def test_an_export_of_many_images_is_not_rewritten_every_minute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Entries written in all, with a clock: a second to explain an image, a tenth of one to write
    it."""
    clock, written, bundle, explained = [0.0], [0], make_bundle(), list[ImageResult]()
    explain_with(
        bundle,
        make_items(["a"]),
        ExplainOptions(methods=("rollout",), sanity_checks=False),
        explained.extend,
    )
    monkeypatch.setattr(writer, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        writer.MapWriter, "_describe", lambda map_writer, image: {"path": image.item.path}
    )

    def save(path: Path, text: str) -> None:
        written[0] += text.count('"path":')
        clock[0] += 0.1 * text.count('"path":')

    monkeypatch.setattr(writer, "write_text", save)

    def measure(count: int) -> int:
        written[0] = 0
        with writer.MapWriter(tmp_path, bundle, ExplainOptions(formats=())) as map_writer:
            for _ in range(count):
                clock[0] += 1
                map_writer.add(explained)
        return written[0]

    assert measure(8000) < 2.5 * measure(4000)
    assert measure(8000) < 3 * 8000  # once a minute: half a million


def test_a_report_of_many_unreadable_images_names_the_first() -> None:
    case = make_case(300, ("cat", "dog", "bird"), side=16, examples=1)
    object.__setattr__(
        case.evaluation, "unreadable", [(f"{index}.png", "broken") for index in range(5000)]
    )
    page = build(case)
    assert page.count("broken</li>") == 1000
    assert "5000 unreadable images" in page


# --- tokens
# ------------------------------------------------------------------------------------------------


def test_rollout_of_every_token_holds_one_layer_of_heads_at_a_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bundle, alive, most = make_bundle(depth=6), list[weakref.ref[torch.Tensor]](), [0]
    forward = run_forward(bundle.model, torch.zeros(1, 3, 32, 32))
    attention = AttentionLayer.attention

    def watch(layer: AttentionLayer, images: slice) -> torch.Tensor:
        most[0] = max(most[0], sum(each() is not None for each in alive))
        alive.append(weakref.ref(made := attention(layer, images)))
        return made

    monkeypatch.setattr(AttentionLayer, "attention", watch)
    # the lens of one class, pooled rows, and rollout alone
    num_bytes = 4 * 6 * 17 + 6 * 3 * 17 + 17 * 17
    found = token_details.measure_tokens(
        forward, 0, targets=torch.tensor([0]), temperature=1.0, max_bytes=num_bytes
    )
    assert len(found.attention) == 1
    assert len(alive) == 2 * 6  # once for the pooled rows, once for rollout
    assert most[0] <= 1


def test_removal_gradient_holds_a_few_query_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, of_rows = list[int](), removal._differentiate_gates

    def watch(attention: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        sizes.append(attention.numel())
        return of_rows(attention, gradient)

    def explain(side: int) -> torch.Tensor:
        sizes.clear()
        images = torch.rand(2, 3, side, side, generator=torch.Generator().manual_seed(0))
        forward = run_forward(make_bundle(size=side).model, images, gradients=True)
        return removal.compute_removal_gradient(forward, forward.logits[:, 0]).detach()

    whole = explain(64)
    monkeypatch.setattr(removal, "_differentiate_gates", watch)
    monkeypatch.setattr(layers, "CHUNK_ELEMENTS", 3 * 65 * 7)
    torch.testing.assert_close(explain(64), whole, rtol=1e-5, atol=1e-7)
    assert (
        max(sizes) == 3 * 65 * 7
    )  # seven rows of an image: all rows of 65 tokens would be nine times that
    explain(128)  # four times the tokens
    assert max(sizes) <= 2 * 3 * 65 * 7
