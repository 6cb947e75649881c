"""Written predictions are measured and audited as the images themselves are."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image
from sklearn.datasets import load_digits

import vit

TIMES = ("conditions", "cost", "fingerprint", "notes", "duplicates_of_training")
CPU = {"device": "cpu", "precision": "float32"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Digits in a folder for each class; one file is no image."""
    root = tmp_path_factory.mktemp("digits")
    digits = load_digits()
    for number, (pixels, label) in enumerate(zip(digits.images[:300], digits.target, strict=False)):
        path = root / str(label) / f"{number:03d}.png"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray((pixels * 15.9).astype(np.uint8)).save(path)
    path.write_bytes(b"no image")
    return root


@pytest.fixture(scope="module")
def written(tiny_model_file: Path, root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two parts in another order, with paths as on another machine."""
    folder = tmp_path_factory.mktemp("written")
    images = sorted(root.rglob("*.png"))
    predictions = vit.predict(tiny_model_file, images, top_k=10, **CPU).predictions
    readable_images = [
        path for path, found in zip(images, predictions, strict=True) if found.error is None
    ]
    embeddings = dict(
        zip(readable_images, vit.embed(tiny_model_file, readable_images, **CPU), strict=True)
    )
    rows = []
    for path, found in reversed(list(zip(images, predictions, strict=True))):
        by_index = {index: probability for index, _, probability in found.classes}
        readable = found.error is None
        rows.append(
            {
                "path": f"s3://bucket/photos/{path.relative_to(root)}",
                "error": found.error,
                "probabilities": [by_index[index] for index in range(10)] if readable else None,
                "embedding": embeddings.get(path),
            }
        )
    floats = pa.list_(pa.float32())
    schema = pa.schema(
        [("path", pa.string()), ("error", pa.string()), ("probabilities", floats), ("embedding", floats)]
    )  # fmt: skip
    for number, part in enumerate((rows[:100], rows[100:])):
        pq.write_table(pa.Table.from_pylist(part, schema), folder / f"part-{number}.parquet")
    return folder


def flatten(value: Any, name: str = "") -> dict[str, Any]:
    """The numbers and texts of a nested value, by their place."""
    if not isinstance(value, dict | list | tuple):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    return {
        key: leaf for place, each in items for key, leaf in flatten(each, f"{name}.{place}").items()
    }


def test_metrics_are_those_of_the_images(tiny_model_file: Path, root: Path, written: Path) -> None:
    direct = vit.evaluate(tiny_model_file, data=root, split="all", **CPU).evaluation.model_dump()
    found = vit.evaluate(tiny_model_file, data=root, split="all", predictions=written, **CPU)
    measured = found.evaluation.model_dump()
    assert measured["num_images"] == 299
    assert [name for name, _ in measured["unreadable"]] == [
        name for name, _ in direct["unreadable"]
    ]
    num_compared = 0
    for name in direct.keys() - {*TIMES, "unreadable"}:
        expected, values = flatten(direct[name]), flatten(measured[name])
        assert values.keys() == expected.keys()
        for place, value in expected.items():
            if isinstance(value, float):
                value = pytest.approx(value, rel=2e-6, abs=1e-6)
            assert values[place] == value, (name, place)
            num_compared += 1
    assert num_compared > 200
    assert "</html>" in str(found.build_files()["report.html"])


def test_a_prediction_that_is_missing_or_doubled_is_named(
    tiny_model_file: Path, root: Path, written: Path, tmp_path: Path
) -> None:
    part = pq.read_table(written / "part-0.parquet")
    pq.write_table(part, tmp_path / "a.parquet")
    with pytest.raises(ValueError, match=r"has 0 predictions of 0/000\.png"):
        vit.evaluate(tiny_model_file, data=root, split="all", predictions=tmp_path, **CPU)
    for name in ("a", "b"):
        pq.write_table(pq.read_table(written), tmp_path / f"{name}.parquet")
    with pytest.raises(ValueError, match=r"has 2 predictions of 0/000\.png"):
        vit.evaluate(tiny_model_file, data=root, split="all", predictions=tmp_path, **CPU)


def test_rows_of_parquet_files_are_found(tiny_model_file: Path, tmp_path: Path) -> None:
    images = load_digits().images[:60]
    for name, start, end in (("train-0", 0, 20), ("test-0", 20, 35), ("test-1", 35, 60)):
        rows = []
        for pixels in images[start:end]:
            stream = io.BytesIO()
            Image.fromarray((pixels * 15.9).astype(np.uint8)).save(stream, "PNG")
            rows.append({"bytes": stream.getvalue(), "path": None})
        labels = [str(label) for label in load_digits().target[start:end]]
        (tmp_path / "digits").mkdir(exist_ok=True)
        pq.write_table(
            pa.table({"image": rows, "label": labels}), tmp_path / f"digits/{name}.parquet"
        )
    vit.predict(tiny_model_file, tmp_path / "digits", output=tmp_path / "rows.parquet", **CPU)
    options = {"data": tmp_path / "digits", "split": "test", **CPU}
    direct = vit.evaluate(tiny_model_file, **options).evaluation
    found = vit.evaluate(
        tiny_model_file, predictions=tmp_path / "rows.parquet", **options
    ).evaluation
    assert found.num_images == direct.num_images == 40
    assert found.top1 == direct.top1
    assert found.loss == pytest.approx(direct.loss, abs=1e-6)


@pytest.mark.extended
def test_an_audit_needs_no_images(tiny_model_file: Path, root: Path, written: Path) -> None:
    direct = vit.audit(root, model=tiny_model_file, **CPU).audit
    result = vit.audit(root, model=tiny_model_file, predictions=written, **CPU)
    found = result.audit
    page = result.build_files()["audit.html"]
    assert "data:image/" in page
    assert "odd property" not in page
    assert found.num_images == direct.num_images == 299
    # the folds are others: they come of the pixels' hashes
    assert found.top1 == pytest.approx(direct.top1, abs=0.08)
    distances = [{each.path: each.distance for each in audit.outliers} for audit in (direct, found)]
    assert distances[0] == pytest.approx(distances[1], abs=1e-5)
    assert found.properties == {}
