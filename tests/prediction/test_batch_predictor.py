"""Logits are the model's, whatever the batches and however many processes share them."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from tests.conftest import Launcher
from vit.bundle import Bundle
from vit.evaluation.images import EvaluationSet
from vit.prediction.batch_predictor import BatchPredictor, Precision
from vit.prediction.probabilities import Float32s


def predict(
    bundle: Bundle,
    images: EvaluationSet,
    *,
    batch_size: int = 100,
    precision: Precision = "float32",
) -> Float32s:
    predictor = BatchPredictor(
        model=bundle.model,
        preprocess=bundle.preprocess,
        num_classes=10,
        batch_size=batch_size,
        device=torch.device("cpu"),
        precision=precision,
    )
    return predictor.predict(images.read, count=len(images))


def test_logits_are_those_of_the_plain_model(bundle: Bundle, images: EvaluationSet) -> None:
    inputs = bundle.preprocess(_pil_images(images))
    with torch.inference_mode():
        expected = bundle.model(inputs).numpy()
    assert np.abs(predict(bundle, images) - expected).max() < 1e-5
    # the batch size changes the last bits alone
    assert np.abs(predict(bundle, images, batch_size=7) - expected).max() < 1e-5


@pytest.mark.parametrize(("precision", "limit"), [("bfloat16", 0.3), ("float16", 0.04)])
def test_half_precision_logits_are_float32_and_do_not_tie(
    bundle: Bundle, images: EvaluationSet, precision: str, limit: float
) -> None:
    logits = predict(bundle, images, precision=precision)
    assert logits.dtype == np.float32
    rounded = torch.from_numpy(logits).to(getattr(torch, precision)).float().numpy()
    assert (logits != rounded).mean() > 0.9
    assert 0 < np.abs(logits - predict(bundle, images)).max() < limit


def test_no_batch_is_read_before_the_one_before_it_is_computed(bundle: Bundle) -> None:
    events: list[str] = []
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.LazyLinear(10))
    model.register_forward_hook(lambda *_: events.append("computed"))
    cpu = torch.device("cpu")
    predictor = BatchPredictor(model, bundle.preprocess, 10, 64, cpu, "float32")

    def read(start: int, stop: int) -> np.ndarray:
        events.append("read")
        return np.zeros((stop - start, 8, 8, 3), np.uint8)

    predictor.predict(read, count=320)
    assert events == ["read", "computed"] * (len(events) // 2)
    assert len(events) > 8


SCRIPT = """
import sys
import numpy as np, torch
import torch.distributed as dist
from vit.bundle import load_bundle
from vit.data.open import open_dataset
from vit.prediction.batch_predictor import BatchPredictor
from vit.evaluation.images import load_images

model, out = sys.argv[1], sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo")
bundle = load_bundle(model)
images = load_images(bundle, open_dataset("digits"), "test")
predictor = BatchPredictor(bundle.model, bundle.preprocess, 10, 32, torch.device("cpu"), "float32")
for count in map(int, sys.argv[3:]):
    seen, heard = [], []
    def read(start, stop):
        seen.extend(range(start, stop))
        return images.read(start, stop)
    logits = predictor.predict(read, count=count, on_progress=heard.append)
    np.savez(f"{out}.{count}.{dist.get_rank()}.npz", logits=logits, seen=seen, heard=sum(heard))
dist.destroy_process_group()
"""


@pytest.mark.chaos
def test_processes_share_the_images_and_agree_bit_for_bit(
    cli: Launcher, tiny_model_file: Path, bundle: Bundle, images: EvaluationSet, tmp_path: Path
) -> None:
    script = tmp_path / "predict.py"
    script.write_text(SCRIPT)
    world, counts = (
        3,
        (100, 31),
    )  # 4 batches, the last of 4 images; one batch, and none for two processes
    cli.finish(
        cli.start(
            tiny_model_file, tmp_path / "out", *counts, processes=world, program=[str(script)]
        )
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        predictor = BatchPredictor(
            bundle.model, bundle.preprocess, 10, 32, torch.device("cpu"), "float32"
        )
        alone = {count: predictor.predict(images.read, count=count) for count in counts}
    finally:
        torch.set_num_threads(threads)
    for count in counts:
        parts = [np.load(tmp_path / f"out.{count}.{rank}.npz") for rank in range(world)]
        for part in parts:
            assert np.array_equal(part["logits"], alone[count])
        seen = np.concatenate([part["seen"] for part in parts])
        assert sorted(seen.tolist()) == list(range(count))  # every image once
        assert parts[0]["heard"] == count


def _pil_images(images: EvaluationSet) -> list[Image.Image]:
    return [Image.fromarray(images.read(index, index + 1)[0]) for index in range(len(images))]
