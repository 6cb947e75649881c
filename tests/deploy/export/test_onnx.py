"""The ONNX file and the program beside it answer as `vit predict` does."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_sample_images

import vit
from tests.conftest import Launcher, SaveModel, change_metadata
from tests.deploy.conftest import change_task
from tests.deploy.export.odd_images import write_odd_images
from vit.bundle import load_bundle
from vit.data.preprocess import Preprocess

NAMES = tuple(f"class {index}, 'ä'" for index in range(5))
# predict.py must not import these
WITHOUT = "import runpy, sys\nfor name in ('torch', 'vit', 'timm'): sys.modules[name] = None\n"
RUN = WITHOUT + "sys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    paths = write_odd_images(tmp_path_factory.mktemp("photos"))
    assert len(paths) >= 40
    return paths


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    """A model with a recipe's stem and MLP, and a temperature."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    architecture: dict[str, Any] = {"stem": "conv_pool", "mlp": "relu2", "pos_embed": "sincos"}
    architecture |= {"global_pool": "avg", "img_size": 32, "patch_size": 8, "depth": 1}
    preprocess = Preprocess((32, 32), crop_pct=0.875)
    save_model(path, class_names=NAMES, preprocess=preprocess, **architecture)
    change_metadata(path, {"temperature": 1.7})
    return path


@pytest.fixture(scope="module")
def folder(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("onnx") / "out"
    return vit.export_model(model_file, output=output, attention=True).parent


def run_program(folder: Path, *paths: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-c", RUN, str(folder / "predict.py"), *map(str, paths)]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    return [json.loads(line) for line in outcome.stdout.splitlines()]


@pytest.mark.parametrize(
    ("task", "preprocess"),
    [
        ("classes", {}),
        (
            "class from a threshold",
            {"interpolation": "bilinear", "resize_mode": "stretch", "image_size": [32, 48]},
        ),
        ("labels from thresholds", {"crop_pct": 0.6, "value_range": [1000.0, 60000.0]}),
    ],
)
def test_the_program_predicts_forty_pictures_as_vit_does(
    photos: list[Path],
    save_model: SaveModel,
    tmp_path: Path,
    task: str,
    preprocess: dict[str, Any],
) -> None:
    values = {"image_size": [32, 32], "crop_pct": 0.875, **preprocess}
    path = save_model(
        tmp_path / "saved.safetensors",
        class_names=NAMES,
        img_size=tuple(values["image_size"]),
        patch_size=8,
        depth=1,
        preprocess=Preprocess.from_dict(values),
    )
    change_metadata(path, {"temperature": 0.4})
    path = change_task(path, tmp_path / "model.safetensors", task)
    folder = vit.export_model(path, output=tmp_path / "out").parent
    expected = vit.predict(path, list(map(str, photos)), precision="float32").predictions
    found = run_program(folder, *photos)
    assert len(found) == len(expected)
    for ours, prediction in zip(found, expected, strict=True):
        assert ours["path"] == prediction.path
        # a model that was trained on 8 bits refuses deeper images
        is_deep = Path(prediction.path).name[:2] in ("12", "16") and "value_range" not in preprocess
        assert (prediction.error is not None) == ("error" in ours) == is_deep, (prediction, ours)
        if is_deep:
            continue
        rows = [(row["index"], row["name"], row["probability"]) for row in ours["predictions"]]
        assert rows == [
            (index, name, pytest.approx(probability, abs=1e-5))
            for index, name, probability in prediction.classes
        ], ours["path"]
        assert ours.get("labels") == prediction.labels
    # it is no model that always answers the same
    tops = np.array([[row[2] for row in sorted(each.classes)] for each in expected if each.classes])
    assert tops.std(axis=0).max() > 0.05


def test_the_program_refuses_what_it_would_read_wrongly_and_goes_on(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    image = Image.fromarray(load_sample_images().images[0][:40, :60])
    # Pillow would start gs, the first of PATH, for a file of PostScript
    image.save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.jpg")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    image.convert("F").save(tmp_path / "b.tif")
    image.save(tmp_path / "c.png")
    paths = [tmp_path / name for name in ("a.jpg", "b.tif", "absent.png", "c.png")]
    records = run_program(folder, *paths)
    assert [record["path"] for record in records] == list(map(str, paths))
    assert ["error" in record for record in records] == [True, True, True, False]
    assert not (tmp_path / "started").exists()


def test_the_file_says_all_that_is_needed(folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (given,) = session.get_inputs()
    assert (given.name, given.type, given.shape) == (
        "pixel_values",
        "tensor(float)",
        ["batch", 3, 32, 32],
    )
    assert {output.name: output.shape for output in session.get_outputs()} == {
        "logits": ["batch", 5],
        "probabilities": ["batch", 5],
        "attention": ["batch", 4, 4],
    }
    texts = session.get_modelmeta().custom_metadata_map
    facts = {name: json.loads(text) for name, text in texts.items()}
    assert facts["class_names"] == list(NAMES)
    assert Preprocess.from_dict(facts["preprocess"]) == Preprocess((32, 32), crop_pct=0.875)
    assert (facts["temperature"], facts["task"], facts["thresholds"]) == (1.7, "classes", {})
    written = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(written, full_check=True)
    assert not {node.op_type for node in written.graph.node} & {"If", "Loop", "Resize"}
    assert onnx.TensorProto.DOUBLE not in {each.data_type for each in written.graph.initializer}
    # nothing of the machine that wrote it
    content = (folder / "model.onnx").read_bytes()
    for trace in (b".py", b"/home", b"/root", b"site-packages", b"torch.export", b"stack_trace"):
        assert trace not in content


def test_any_number_of_images_gives_the_rollout_of_each(model_file: Path, folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    china, flower = (image[:300, :200] for image in load_sample_images().images)
    bundle = load_bundle(model_file)
    explanation = vit.explain(bundle, [china, flower], methods="rollout", checks=False)
    for order in ([0], [0, 1], [1, 0, 1]):
        images = bundle.preprocess([Image.fromarray((china, flower)[place]) for place in order])
        logits, probabilities, maps = session.run(None, {"pixel_values": images.numpy()})
        with torch.no_grad():
            expected = bundle.model(images) / 1.7
        np.testing.assert_allclose(logits, expected, atol=1e-5)
        np.testing.assert_allclose(probabilities, expected.softmax(dim=1), atol=1e-5)
        np.testing.assert_allclose(maps, explanation.maps["rollout"][order], atol=1e-5)


def test_onnxruntime_makes_weights_of_8_and_16_bits(folder: Path, tmp_path: Path) -> None:
    """The lines of the guide."""
    from onnxruntime.quantization import quantize_dynamic
    from onnxruntime.transformers.float16 import convert_float_to_float16

    file = folder / "model.onnx"
    quantize_dynamic(file, tmp_path / "int8.onnx", op_types_to_quantize=["MatMul"])
    half = convert_float_to_float16(onnx.load(file), keep_io_types=True)
    onnx.save(half, tmp_path / "float16.onnx")
    images = {"pixel_values": np.random.default_rng(0).normal(size=(2, 3, 32, 32)).astype("f")}
    (expected,) = onnxruntime.InferenceSession(file).run(["probabilities"], images)
    for name, atol, share in (("int8", 0.1, 0.7), ("float16", 0.01, 0.7)):
        smaller = tmp_path / f"{name}.onnx"
        (found,) = onnxruntime.InferenceSession(smaller).run(["probabilities"], images)
        np.testing.assert_allclose(found, expected, atol=atol)
        assert smaller.stat().st_size < share * file.stat().st_size


def test_onnx_needs_its_packages_and_a_classifier(
    cli: Launcher, model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import timm

    headless = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1)
    with pytest.raises(ValueError, match="no classifier"):
        vit.export_model(headless, output=tmp_path / "headless")
    assert not (tmp_path / "headless").exists()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    told = cli.fail("export", model_file, "--output", tmp_path / "out")
    assert "'.[export]'" in told
