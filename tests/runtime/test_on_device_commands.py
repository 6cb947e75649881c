"""The commands on the pretend device and on the CPU: with the same results."""

import asyncio
import csv
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from tests.conftest import TINY_RUN, Launcher, SaveModel
from tests.runtime.conftest import Counter
from vit.bundle import load_bundle
from vit.deploy.export.export_model import export_model

CLOCKS = {
    "images_per_second",
    "elapsed_seconds",
    "milliseconds_per_image",
    "conditions",
    "cost",
    "device",
    "model",
}
Both = Callable[..., list[Any]]


@pytest.fixture
def both(npu: Counter, cli: Launcher, tmp_path: Path) -> Both:
    """both(command, …) runs it on "npu" and on the CPU; gives its two outcomes and directories."""

    def run(*command: object, output: bool = True) -> list[Any]:
        found = []
        for device in ("npu", "cpu"):
            directory = tmp_path / f"{command[0]}-{device}"
            written = ["--output", directory] if output else []
            found.append((cli.succeed(*command, "--device", device, *written), directory))
        return found

    return run


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty-eight images of noise, in three classes."""
    root, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    for number in range(48):
        folder = root / ("ant", "bee", "cow")[number % 3]
        folder.mkdir(exist_ok=True)
        Image.fromarray(random.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(
            folder / f"{number}.png"
        )
    return root


@pytest.fixture
def model(save_model: SaveModel, tmp_path: Path) -> Path:
    return save_model(tmp_path / "model" / "model.safetensors")


def read_json(path: Path) -> Any:
    """Leave out times and places."""

    def strip(value: Any) -> Any:
        if isinstance(value, list):
            return [strip(each) for each in value]
        return (
            {k: strip(v) for k, v in value.items() if k not in CLOCKS}
            if isinstance(value, dict)
            else value
        )

    return strip(json.loads(path.read_text()))


def assert_same_arrays(found: Path, expected: Path) -> None:
    with np.load(found) as arrays, np.load(expected) as others:
        assert arrays.files == others.files
        for name in arrays.files:
            np.testing.assert_array_equal(arrays[name], others[name], name)


@pytest.mark.extended
def test_train_resume_and_export(
    npu: Counter, cli: Launcher, empty_yaml: Path, tmp_path: Path
) -> None:
    """With all that a run shows: curves, pictures, the confusion matrix."""
    overrides = [
        *TINY_RUN,
        "train.max_steps=4",
        "train.epochs=1",
        "train.ema_decay=0.9",
    ]
    for device in ("npu", "cpu"):
        cli.succeed(
            "train", empty_yaml, *overrides, f"train.device={device}", "--output", tmp_path / device
        )
    assert read_json(tmp_path / "npu" / "metrics.jsonl") == read_json(
        tmp_path / "cpu" / "metrics.jsonl"
    )
    found, expected = (
        load_file(tmp_path / device / "model.safetensors") for device in ("npu", "cpu")
    )
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found)
    npu.clear()
    cli.succeed("train", "--output", tmp_path / "npu", "--resume", "train.device=npu")
    assert any(line.startswith("host→device") for line in npu)  # the checkpoint
    bundle = load_bundle(tmp_path / "npu", device=torch.device("npu", 0))
    for form in ("timm", "huggingface"):  # from where the model lies
        assert export_model(bundle, format=form, output=tmp_path / form).exists()
        bundle.model.to("npu")


@pytest.mark.extended
def test_evaluate_and_compare(both: Both, cli: Launcher, model: Path, photos: Path) -> None:
    options = (
        "--precision",
        "float32",
        "--num-examples",
        2,
        "--batch-size",
        64,
    )
    (_, found), (_, expected) = both("evaluate", model, "--data", photos, *options)
    assert read_json(found / "evaluation.json") == read_json(expected / "evaluation.json")
    assert (found / "predictions.csv").read_bytes() == (expected / "predictions.csv").read_bytes()
    cli.succeed("compare", found, expected)


def test_predict(both: Both, model: Path, photos: Path) -> None:
    # of fewer than four images the last bits may differ
    (found, _), (expected, _) = both("predict", model, photos, "--format", "csv", output=False)
    rows = [list(csv.reader(io.StringIO(outcome.out))) for outcome in (found, expected)]
    assert len(rows[0]) > 1
    assert rows[0] == rows[1]


def test_attention_with_pages(both: Both, tiny_run: Path) -> None:
    options = (
        "--method",
        "rollout,libra-removal",
        "--format",
        "png,npz,html",
        "--num-images",
        4,
    )
    (_, found), (_, expected) = both("explain", tiny_run, *options)
    assert_same_arrays(found / "maps.npz", expected / "maps.npz")
    pictures = [path.name for path in expected.glob("*.png")]
    assert len(pictures) >= 8
    assert all((found / name).read_bytes() == (expected / name).read_bytes() for name in pictures)


@pytest.mark.extended
def test_faithfulness_which_failed_at_87603b9(
    both: Both, save_model: SaveModel, photos: Path, tmp_path: Path
) -> None:
    """Orders of patches were made on the host there and met the device's numbers: `dropping.py: a
    host tensor among device tensors`, as on CUDA."""
    # four patches, because each pass takes time
    model = save_model(tmp_path / "model.safetensors", img_size=8, depth=1)
    options = ("--data", photos, "--method", "gae", "--num-images", 8)
    (_, found), (_, expected) = both("faithfulness", model, *options)
    values = [read_json(path / "faithfulness.json")["values"] for path in (found, expected)]
    assert values[0] == values[1]


def test_serve(npu: Counter, monkeypatch: pytest.MonkeyPatch, model: Path, photos: Path) -> None:
    httpx2 = pytest.importorskip("httpx2", reason="the extra serve is not installed")
    serve = pytest.importorskip("vit.deploy.serve.app", reason="the extra serve is not installed")

    # the pretend device is one thread's
    async def run_here(batches: object, function: Callable[..., Any], *values: object) -> Any:
        return function(*values)

    async def ask(device: str) -> Any:
        app = serve.build_app(load_bundle(model, device=torch.device(device)))
        async with httpx2.AsyncClient(
            transport=httpx2.ASGITransport(app), base_url="http://127.0.0.1"
        ) as client:
            files = {"image": (photos / "ant" / "0.png").read_bytes()}
            return (await client.post("/predict?map=true", files=files)).raise_for_status().json()

    monkeypatch.setattr(serve.Batches, "run", run_here)
    found, expected = asyncio.run(ask("npu:0")), asyncio.run(ask("cpu"))
    # of fewer than four images the last bits may differ
    for answer, other in zip(found["classes"], expected["classes"], strict=True):
        assert answer.pop("probability") == pytest.approx(other.pop("probability"), rel=1e-6)
    assert found == expected
    assert any(line.startswith("host→device") for line in npu)
