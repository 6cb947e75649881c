"""The ONNX folder is right without reading anything: raw pixels in, the classes of `vit predict`
out."""

import ast
import json
import os
import shutil
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
from tests.conftest import Launcher, SaveModel
from tests.deploy.conftest import TASKS, change_task
from vit.bundle import load_bundle, save_bundle, update_metadata
from vit.data.preprocess import Preprocess
from vit.deploy.export.onnx_file import Decision
from vit.deploy.export.python_formats import write_program
from vit.explanation.checks.sanity_checks import VERDICTS
from vit.explanation.methods.rollout import LogitsAndRollout
from vit.prediction.decision import decide_classes, decide_labels

NAMES = tuple(f"class {index}, 'ä'" for index in range(10))
MODES = ("RGB", "L", "RGBA", "LA", "P", "P transparent", "CMYK", "I;16", "1", "EXIF 6", "EXIF 3")
# of what predict.py must not import
WITHOUT = "import sys\nfor name in ('torch', 'vit', 'timm'): sys.modules[name] = None\n"
RUN = (
    WITHOUT
    + "import runpy\nsys.argv = sys.argv[1:]\nrunpy.run_path(sys.argv[0], run_name='__main__')"
)


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """200 photographs: cut-outs of two, of sides from 1 to 640 and all modes."""
    folder, random = tmp_path_factory.mktemp("photos"), np.random.default_rng(0)
    originals = [Image.fromarray(image) for image in load_sample_images().images]
    for number in range(200):
        original = originals[number % 2]
        width, height = (int(random.choice([1, 9, 40, 100, 250, side])) for side in original.size)
        left, top = int(random.integers(640 - width + 1)), int(random.integers(427 - height + 1))
        cut = original.crop((left, top, left + width, top + height)).rotate(
            float(random.integers(4)) * 90
        )
        save_as(MODES[number % len(MODES)], cut, folder / f"{number:03d}")
    return folder


def save_as(mode: str, image: Image.Image, path: Path) -> None:
    grey = image.convert("L")
    if mode.startswith("EXIF"):
        exif = Image.Exif()
        exif[0x0112] = int(mode[-1])
        image.save(path.with_suffix(".jpg"), exif=exif)
    elif mode == "I;16":
        Image.fromarray(np.asarray(grey).astype(np.uint16) * 255).save(path.with_suffix(".png"))
    elif mode in ("RGBA", "LA"):
        image = image.convert(mode[:-1])
        image.putalpha(grey)
        image.save(path.with_suffix(".png"))
    elif mode == "P transparent":
        image.quantize(16).save(path.with_suffix(".png"), transparency=3)
    else:
        image.convert(mode).save(path.with_suffix(".jpg" if mode in ("RGB", "CMYK") else ".png"))


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    """Of the options of the recipes; not trained, but its classes differ from photograph to
    photograph."""
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    architecture: dict[str, Any] = {
        "stem": "conv_pool_residual",
        "mlp": "relu2",
        "pos_embed": "sincos",
    }
    architecture |= {"global_pool": "avg", "img_size": 32, "patch_size": 8}
    preprocess = Preprocess((32, 32), crop_pct=0.875)
    save_model(path, class_names=NAMES, preprocess=preprocess, **architecture)
    bundle = load_bundle(path)
    images = torch.randn(64, 3, 32, 32) * torch.rand(64, 3, 1, 1) * 2
    with torch.no_grad():
        logits = bundle.model(images)
        bundle.model.head.weight /= logits.std(dim=0)[:, None]
        bundle.model.head.bias -= logits.mean(dim=0)
    whole = {"preprocess": preprocess, "class_names": NAMES, "config": {}, "data": {}}
    save_bundle(path, bundle.model, **whole)  # type: ignore[arg-type]
    update_metadata(path, {"temperature": 1.7})
    return path


@pytest.fixture(scope="module")
def folder(model_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vit.export_model(
        model_file, output=tmp_path_factory.mktemp("onnx") / "out", attention=True
    ).parent


# which `vit predict` says of the photographs of more bits
@pytest.mark.filterwarnings("ignore:16-bit images")
@pytest.mark.extended
@pytest.mark.parametrize("task", TASKS)
def test_the_exported_program_predicts_200_photographs_as_vit_does(
    photos: Path, model_file: Path, folder: Path, cli: Launcher, task: str, tmp_path: Path
) -> None:
    if task != "classes":
        model_file = change_task(model_file, tmp_path / "model.safetensors", task)
        folder = vit.export_model(model_file, output=tmp_path / "out").parent
        facts = json.loads((folder / "model.json").read_text())
        assert facts.get("task") == ("multilabel" if "labels" in task else None)
        assert ("operating_point" in facts) == ("threshold" in task)
    paths = sorted(map(str, photos.iterdir()))
    assert len(paths) == 200
    told = cli.succeed("predict", model_file, *paths, "--top-k", 10, "--precision", "float32").out
    expected = [json.loads(line) for line in told.splitlines()]
    command = [sys.executable, "-c", RUN, str(folder / "predict.py"), *paths]
    outcome = subprocess.run(command, capture_output=True, text=True, check=False)
    assert outcome.returncode == 0, outcome.stderr
    found = [json.loads(line) for line in outcome.stdout.splitlines()]
    assert [of_image["path"] for of_image in found] == paths
    tops = [of_image["predictions"][0]["name"] for of_image in found]
    assert tops == [of_image["predictions"][0]["name"] for of_image in expected]
    assert [of_image.get("labels") for of_image in found] == [
        of_image.get("labels") for of_image in expected
    ]
    assert len(set(tops)) >= 4  # it is no model that always answers the same
    for ours, theirs in zip(found, expected, strict=True):
        by_name = {each["name"]: each["probability"] for each in theirs["predictions"]}
        for each in ours["predictions"]:
            assert each["probability"] == pytest.approx(by_name[each["name"]], abs=1e-5), ours[
                "path"
            ]


def test_predict_takes_three_libraries(tmp_path: Path) -> None:
    write_program(tmp_path / "predict.py")
    text = (tmp_path / "predict.py").read_text()
    imports = [
        node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    modules = {
        node.module if isinstance(node, ast.ImportFrom) else node.names[0].name for node in imports
    }
    assert {str(name).partition(".")[0] for name in modules} - sys.stdlib_module_names == {
        "PIL",
        "numpy",
        "onnxruntime",
    }


def test_the_file_says_all_that_is_needed(folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    (images,), (probabilities, attention, values) = session.get_inputs(), session.get_outputs()
    assert (images.name, images.type, images.shape) == (
        "images",
        "tensor(uint8)",
        ["batch", "height", "width", 3],
    )
    assert (probabilities.name, probabilities.shape) == ("probabilities", ["batch", 10])
    assert (attention.name, attention.shape) == ("attention", ["batch", 4, 4])
    assert (values.name, values.shape) == ("pixel_values", ["batch", 3, 32, 32])
    facts = session.get_modelmeta().custom_metadata_map
    assert json.loads(facts["class_names"]) == list(NAMES)
    assert Preprocess.from_dict(json.loads(facts["preprocess"])) == Preprocess(
        (32, 32), crop_pct=0.875
    )
    assert json.loads(facts["temperature"]) == 1.7
    told = json.loads((folder / "model.json").read_text())
    assert {name: json.dumps(told[name]) for name in ("class_names", "preprocess")} == {
        name: facts[name] for name in ("class_names", "preprocess")
    }
    assert "python predict.py PHOTO" in (folder / "README.md").read_text()
    onnx.checker.check_model(onnx.load(folder / "model.onnx"), full_check=True)
    operators = {node.op_type for node in onnx.load(folder / "model.onnx").graph.node}
    assert not operators & {"If", "Loop", "Resize"}
    # nothing of the machine that wrote it
    written = (folder / "model.onnx").read_bytes()
    for trace in (b".py", b"/home", b"/root", b"site-packages", b"torch.export", b"stack_trace"):
        assert trace not in written


def test_any_number_of_images_gives_the_rollout_of_each(model_file: Path, folder: Path) -> None:
    session = onnxruntime.InferenceSession(folder / "model.onnx")
    china, flower = (image[:300, :200] for image in load_sample_images().images)
    explanation = vit.explain(model_file, [china, flower], checks=False)
    for given in ([china], [china, flower], [flower, china, flower]):
        probabilities, maps, values = session.run(None, {"images": np.stack(given)})
        order = [0 if image is china else 1 for image in given]
        pixels = load_bundle(model_file).preprocess([Image.fromarray(image) for image in given])
        np.testing.assert_allclose(values, pixels, atol=1e-6)
        np.testing.assert_allclose(maps, explanation.maps["rollout"][order], atol=1e-5)
        np.testing.assert_allclose(probabilities, explanation.probabilities[order], atol=1e-5)
        assert probabilities.sum(axis=1) == pytest.approx(np.ones(len(given)), abs=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_the_traced_decision_is_that_of_predict(
    task: str, model_file: Path, tmp_path: Path
) -> None:
    bundle = load_bundle(change_task(model_file, tmp_path / "model.safetensors", task))
    probabilities = np.random.default_rng(0).dirichlet(np.full(10, 0.3), 500)
    decision = Decision.from_bundle(bundle)
    if task == "classes":
        assert decision is None
        return
    assert decision is not None
    predicted = decision(torch.from_numpy(probabilities)).numpy()
    if bundle.is_multilabel:
        expected = decide_labels(bundle, probabilities)
    else:
        expected = np.eye(10, dtype=bool)[decide_classes(bundle, probabilities)]
    np.testing.assert_array_equal(predicted, expected)
    assert (predicted[:, 1] != (probabilities.argmax(axis=1) == 1)).sum() > 20


@pytest.mark.parametrize("pool", ["token", "avg"])
def test_the_traced_rollout_is_that_of_explain(
    pool: str, save_model: SaveModel, tmp_path: Path
) -> None:
    bundle = load_bundle(
        save_model(tmp_path / "model.safetensors", global_pool=pool, class_token=True, reg_tokens=2)
    )
    china, model = load_sample_images().images[0], bundle.model
    images = bundle.preprocess([Image.fromarray(china)])
    logits, maps, _ = LogitsAndRollout(model)(images)  # type: ignore[arg-type]
    torch.testing.assert_close(
        maps, vit.explain(bundle, china, checks=False).maps["rollout"], atol=1e-6, rtol=0
    )
    torch.testing.assert_close(logits, model(images), atol=1e-5, rtol=0)


@pytest.fixture
def digits(tiny_run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_run, tmp_path / "digits"))


@pytest.mark.extended
@pytest.mark.parametrize(
    "options",
    [(), ("--input", "tensor"), ("--batch-size", 7), ("--input", "tensor", "--batch-size", 7)],
)
def test_int8_comes_with_its_accuracy(
    options: tuple[str | int, ...],
    digits: Path,
    tmp_path: Path,
    cli: Launcher,
    capfd: pytest.CaptureFixture[str],
) -> None:
    cli.succeed("evaluate", digits, "--output", tmp_path / "evaluation", "--precision", "float32")
    evaluation = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    capfd.readouterr()
    outcome = cli.succeed(
        "export", digits, "--output", tmp_path / "out", "--precision", "int8", *options
    )
    assert len(outcome.out.splitlines()) == 1
    assert tuple(capfd.readouterr()) == ("", "")  # nor from beside Python's own streams
    accuracy = json.loads((tmp_path / "out" / "model.json").read_text())["accuracy"]
    assert accuracy["top1"]["float32"] == pytest.approx(evaluation["top1"], abs=1e-9)
    assert (accuracy["num_images"], accuracy["split"]) == (evaluation["num_images"], "test")
    assert accuracy["fingerprint"] == evaluation["fingerprint"]
    assert abs(accuracy["top1"]["int8"] - evaluation["top1"]) < 0.05
    kinds = {
        tensor.data_type for tensor in onnx.load(tmp_path / "out" / "model.onnx").graph.initializer
    }
    assert onnx.TensorProto.UINT8 in kinds
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"int8 {100 * accuracy['top1']['int8']:.2f} %" in card
    assert (
        f"| top1 | {evaluation['top1']:.4f} |" in card
    )  # with its interval, as it lies beside the run


def test_int8_without_images_are_refused(
    model_file: Path, tmp_path: Path, cli: Launcher, save_model: SaveModel
) -> None:
    message = cli.fail("export", model_file, "--output", tmp_path / "out", "--precision", "int8")
    assert "name the images with --data" in message
    assert not (tmp_path / "out").exists()


def test_the_card_says_what_is_known(digits: Path, tmp_path: Path, cli: Launcher) -> None:
    cli.succeed("export", digits, "--format", "timm", "--output", tmp_path / "out")
    card, bundle = (tmp_path / "out" / "README.md").read_text(), vit.load_bundle(digits)
    for fact in (
        "`digits`",
        bundle.data["fingerprint"][:16],
        bundle.sha256,
    ):
        assert fact in card
    assert ("not calibrated" in card) == (bundle.temperature == 1)
    assert "No evaluation of this model" in card
    assert "![A test image and its attention rollout](map.png)" in card
    assert any(f"Patch-removal test: {verdict}: " in card for verdict in VERDICTS)
    with Image.open(tmp_path / "out" / "map.png") as picture:
        assert picture.width > 300


@pytest.mark.parametrize("task", TASKS)
def test_the_card_says_what_is_predicted(task: str, tiny_model_file: Path, tmp_path: Path) -> None:
    path = change_task(tiny_model_file, tmp_path / "model.safetensors", task)
    vit.export_model(path, format="timm", output=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert ("## Labels" in card) == ("10 labels, several an image" in card) == ("labels" in task)
    assert ("their sigmoids are the probabilities" in card) == ("labels" in task)
    assert ("A label is predicted from a probability of 0.5 on." in card) == (task == "labels")
    thresholds = {
        "class from a threshold": "`1` 0.2; below it, the most probable of the other classes.",
        "labels from thresholds": "`0` 0.3, `2` 0.7; the other labels 0.5.",
    }
    assert ("Operating point" in card) == (task in thresholds)
    assert thresholds.get(task, "") in card


def test_the_card_of_a_model_without_data_and_of_strange_names(
    save_model: SaveModel, tmp_path: Path
) -> None:
    path = save_model(tmp_path / "model.safetensors", class_names=("a`b", "c\n# d", "{{ e }}"))
    vit.export_model(path, format="timm", output=tmp_path / "out")
    lines = (tmp_path / "out" / "README.md").read_text().splitlines()
    assert "`a'b`, `c # d`, `{{ e }}`" in lines
    assert "The model file doesn't say what it was trained on." in lines
    assert not (tmp_path / "out" / "map.png").exists()

    # a folder that is gone still has its name
    config = {"data": {"name": "folder", "root": "/gone/holiday photos"}}
    path = save_model(tmp_path / "folder.safetensors", config=config, data={"name": "folder"})
    vit.export_model(path, format="timm", output=tmp_path / "folder")
    card = (tmp_path / "folder" / "README.md").read_text()
    assert "classes, trained on `holiday photos`" in card
    assert "Data set `holiday photos`" in card


@pytest.mark.parametrize("option", [("--attention",), ("--precision", "int8")])
def test_options_of_onnx_are_refused_elsewhere(
    option: tuple[str, ...], model_file: Path, tmp_path: Path, cli: Launcher
) -> None:
    assert "options of --format onnx" in cli.fail(
        "export", model_file, "--format", "timm", "--output", tmp_path / "out", *option
    )


def test_the_exported_program_reads_what_vit_reads_and_goes_on(
    folder: Path, tmp_path: Path, cli: Launcher, model_file: Path
) -> None:
    image = Image.fromarray(load_sample_images().images[0][:40, :60])
    # Pillow would start gs, the first of PATH, for a file of PostScript
    image.save(tmp_path / "a.eps")
    (tmp_path / "a.eps").rename(tmp_path / "a.jpg")
    image.convert("F").save(tmp_path / "b.tif")
    image.save(tmp_path / "c.png")
    (tmp_path / "gs").write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    (tmp_path / "gs").chmod(0o755)

    paths = [str(tmp_path / name) for name in ("a.jpg", "b.tif", "absent.png", "c.png")]
    command = [sys.executable, "-c", RUN, str(folder / "predict.py"), *paths]
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    outcome = subprocess.run(command, capture_output=True, text=True, env=environment, check=True)
    records = [json.loads(line) for line in outcome.stdout.splitlines()]
    expected = cli.succeed("predict", model_file, *paths).out.splitlines()
    assert [record["path"] for record in records] == paths
    assert [record.keys() for record in records] == [json.loads(line).keys() for line in expected]
    assert not (tmp_path / "started").exists()


def test_text_of_a_model_file_is_no_markup_in_its_card(
    save_model: SaveModel, tmp_path: Path
) -> None:
    markup = "<img src=x onerror=alert(1)> [x](javascript:y)"
    data = {"name": "photos", "notes": [markup], "splits": {}}
    path = save_model(tmp_path / "model.safetensors", data=data)
    update_metadata(path, {"versions": {markup: markup}})
    vit.export_model(path, format="timm", output=tmp_path / "out")
    card = (tmp_path / "out" / "README.md").read_text()
    assert card.count(r"\<img src=x onerror=alert(1)\> \[x\](javascript:y)") == 3
    assert "<img" not in card.replace(r"\<img", "")


@pytest.mark.extended
@pytest.mark.parametrize("task", TASKS)
def test_sets_and_p_values_are_those_of_vit(
    task: str, tiny_model_file: Path, photos: Path, tmp_path: Path
) -> None:
    path = change_task(tiny_model_file, tmp_path / "model.safetensors", task)
    paths = sorted(map(str, photos.iterdir()))[:6]
    # a threshold that lies between the probabilities of these photos
    plain = tmp_path / "plain.safetensors"
    update_metadata(path, {"temperature": 1.0}, target=plain)
    probabilities = [
        probability
        for prediction in vit.predict(plain, paths, top_k=10, precision="float32").predictions
        for _, _, probability in prediction.classes
    ]
    conformal = {**load_bundle(path).metadata["conformal"]}
    conformal["thresholds"] = {"0.95": float(np.median(probabilities))}
    update_metadata(path, {"conformal": conformal})
    vit.export_model(path, output=tmp_path / "out")
    command = [sys.executable, str(tmp_path / "out/predict.py"), *paths]
    outcome = subprocess.run(command, capture_output=True, text=True, check=True)
    answers = [json.loads(line) for line in outcome.stdout.splitlines()]
    card = (tmp_path / "out/README.md").read_text()
    assert "is true for what is in the 95 % prediction set; the output `p_value`" in card
    expected = vit.predict(path, paths, device="cpu", precision="float32").predictions
    for answer, prediction in zip(answers, expected, strict=True):
        assert answer.get("labels") == prediction.labels
        assert answer["note"] == prediction.note
        assert answer["prediction_set"] == prediction.prediction_set
        # counted in float32, where the distance of an image may tie with another's
        assert answer["p_value"] == pytest.approx(prediction.p_value, abs=0.01)
        assert 0 < len(prediction.prediction_set or ()) < 10
    assert len({answer["p_value"] for answer in answers}) > 1
