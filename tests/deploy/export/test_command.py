"""`vit export`: other programs compute the same logits."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn

import vit
from tests.conftest import Launcher, Outcome, SaveModel
from tests.deploy.conftest import TASKS, change_task
from tests.deploy.export.odd_images import write_odd_images
from vit.bundle import load_bundle, update_metadata
from vit.data.images import read_image
from vit.data.preprocess import Preprocess
from vit.deploy.export.python_formats import TEMPLATES

NAMES = ("ant", "bee", "cow")
FOR_TIMM: list[dict[str, Any]] = [
    {},
    {"global_pool": "avg", "pos_embed": "sincos"},
    {"global_pool": "avg", "reg_tokens": 2, "qk_norm": True, "class_token": True},
    {
        "mlp": "swiglu",
        "init_values": 1e-5,
        "reg_tokens": 4,
        "no_embed_class": True,
        "mlp_ratio": 3.0,
    },
    {"distilled": True, "qkv_bias": False},
    {"global_pool": "avg", "fc_norm": False, "mlp_ratio": 2.55},
]
# of the recipes, and what else needs the files of code beside the weights
WITH_CODE: list[dict[str, Any]] = [
    {"stem": "conv", "mlp": "relu2", "global_pool": "avg", "pos_embed": "sincos", "qk_norm": True},
    {"stem": "conv_pool", "mlp": "relu2", "global_pool": "avg", "pos_embed": "sincos"},
    {"stem": "conv_pool_residual", "mlp": "relu2", "global_pool": "avg", "pos_embed": "sincos"},
    {"stem": "conv", "patch_size": (2, 8), "mlp": "swiglu", "reg_tokens": 2},
    {"mlp": "relu2", "distilled": True},
]


Export = Callable[..., Outcome]
Save = Callable[..., tuple[Path, nn.Module]]


@pytest.fixture
def save(save_model: SaveModel, tmp_path: Path) -> Save:
    """save(**architecture): a model file whose every parameter matters, and its model."""

    def save(**options: Any) -> tuple[Path, nn.Module]:
        sizes = {"img_size": (8, 16), "embed_dim": 32, "num_heads": 4}
        preprocess = Preprocess(
            (8, 16),
            crop_pct=0.5,
            mean=(0.1, 0.2, 0.3),
            std=(0.4, 0.5, 0.6),
            interpolation="bilinear",
        )
        path = save_model(
            tmp_path / "model.safetensors",
            class_names=NAMES,
            preprocess=preprocess,
            **sizes,
            **options,
        )
        return path, load_bundle(path).model

    return save


@pytest.fixture
def export(cli: Launcher) -> Export:
    return lambda model, to, output, *more: cli.succeed(
        "export", model, "--format", to, "--output", output, *more
    )


@pytest.mark.parametrize("options", FOR_TIMM)
def test_timm_opens_the_folder_and_computes_equal_logits(
    save: Save, export: Export, options: dict[str, Any], tmp_path: Path
) -> None:
    path, model = save(**options)
    export(path, "timm", tmp_path / "out")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(3, 3, 8, 16)
    torch.testing.assert_close(theirs(images), model(images), atol=1e-5, rtol=0)
    config = timm.data.resolve_model_data_config(theirs)
    assert (config["input_size"], config["crop_pct"]) == ((3, 8, 16), 0.5)
    assert [*config["mean"], *config["std"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert config["interpolation"] == "bilinear"
    assert tuple(theirs.pretrained_cfg["label_names"]) == NAMES


@pytest.mark.parametrize("task", TASKS)
def test_what_was_exported_to_timm_comes_back(
    task: str, save: Save, export: Export, tmp_path: Path
) -> None:
    path, model = save()
    path = change_task(path, tmp_path / "changed.safetensors", task)
    export(path, "timm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("problem_type" in config) == (task != "classes")
    assert config.get("operating_point", {}) == load_bundle(path).operating_point
    bundle = load_bundle(f"timm:local-dir:{tmp_path / 'out'}")
    images = torch.randn(3, 3, 8, 16)
    torch.testing.assert_close(bundle.model(images), model(images), atol=1e-5, rtol=0)
    assert bundle.class_names == NAMES
    assert bundle.is_multilabel == ("labels" in task)
    assert bundle.preprocess == load_bundle(path).preprocess


@pytest.mark.extended
def test_timm_opens_stems_with_the_file_beside_them(
    save: Save, export: Export, tmp_path: Path
) -> None:
    """In a process of its own, without vit."""
    images, expected = torch.randn(3, 3, 8, 16), []
    for number, options in enumerate(WITH_CODE):
        path, model = save(**options)
        export(path, "timm", tmp_path / f"{number}")
        expected.append(model(images).detach())
    np.save(tmp_path / "images.npy", images)
    program = f"""import sys
sys.modules["vit"] = None
sys.path.insert(0, "0")
import numpy, timm, timm_vit, torch
images = torch.from_numpy(numpy.load("images.npy"))
models = [timm.create_model(f"local-dir:{{n}}", pretrained=True).eval() for n in range({len(WITH_CODE)})]
assert timm.data.resolve_model_data_config(models[0])["crop_pct"] == 0.5
numpy.save("logits.npy", torch.stack([model(images).detach() for model in models]))"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=tmp_path)
    np.testing.assert_allclose(
        np.load(tmp_path / "logits.npy"), torch.stack(expected), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("options", [*WITH_CODE, *FOR_TIMM])
def test_transformers_opens_the_folder_and_computes_equal_logits(
    save: Save, export: Export, options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    path, model = save(**options)
    update_metadata(path, {"temperature": 2.0})
    export(path, "huggingface", tmp_path / "a-hub.folder")
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": tmp_path / "a-hub.folder",
        "trust_remote_code": True,
    }
    theirs = AutoModelForImageClassification.from_pretrained(**place)
    assert not theirs.training
    assert [theirs.config.id2label[index] for index in range(3)] == list(NAMES)
    processor, photo = (
        AutoImageProcessor.from_pretrained(**place),
        Image.fromarray(load_sample_images().images[0]),
    )
    bundle = load_bundle(path)
    images = bundle.preprocess([photo, photo.crop((0, 0, 100, 400))])
    given = processor([photo, photo.crop((0, 0, 100, 400))], return_tensors="pt")
    torch.testing.assert_close(given["pixel_values"], images, atol=1e-6, rtol=0)
    torch.testing.assert_close(theirs(**given).logits, model(images) / 2, atol=1e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:16-bit images with values up to")
def test_exported_code_reads_images_as_vit_does(save: Save, export: Export, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, pipeline

    path, _ = save()
    export(path, "huggingface", tmp_path / "out")
    preprocess = load_bundle(path).preprocess
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out", trust_remote_code=True)
    program = (TEMPLATES / "predict.py").read_text().partition("session = ")[0]
    predict: dict[str, Any] = {}
    exec(program, predict)

    dicom = tmp_path / "a.dcm"
    dicom.write_bytes(bytes(128) + b"DICM")
    for read in (processor, predict["read_pixels"]):
        with pytest.raises(
            ValueError, match=r"a\.dcm is DICOM, which an export doesn't read; give"
        ):
            read(str(dicom))
    (tmp_path / "images").mkdir()
    paths = write_odd_images(tmp_path / "images")
    num_read = 0
    for image_path in paths:
        photo = read_image(image_path)
        try:
            expected = preprocess([photo])
        except ValueError:
            # what vit refuses, floating-point pixels, others refuse too
            for read in (processor, predict["read_pixels"]):
                with pytest.raises(ValueError, match="floating-point"):
                    read(str(image_path))
            continue
        num_read += 1
        theirs = processor(str(image_path), return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(theirs, expected, atol=1e-6, rtol=0, msg=str(image_path))
        with Image.open(image_path) as opened:
            theirs = processor(opened, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(theirs, expected, atol=1e-6, rtol=0, msg=str(image_path))
        pixels = np.asarray(preprocess.to_rgb(photo))
        np.testing.assert_array_equal(predict["read_pixels"](image_path)[0], pixels)
    assert num_read > 100
    assert num_read < len(paths)

    # the whole way, for what the library would convert to RGB by itself
    classify = pipeline("image-classification", model=str(tmp_path / "out"), trust_remote_code=True)
    for name in ("I16.png", "RGBA.png", "P-tRNS.png"):
        (image_path,) = (tmp_path / "images").glob(f"*-{name}")
        answers = {row["label"]: row["score"] for row in classify(str(image_path))}
        with torch.no_grad():
            logits = load_bundle(path).model(preprocess([read_image(image_path)]))
        expected = dict(zip(NAMES, logits.softmax(dim=1)[0].tolist(), strict=True))
        assert answers == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("task", TASKS)
def test_a_pipeline_of_transformers_predicts_as_vit_does(
    task: str, tiny_model_file: Path, export: Export, tmp_path: Path
) -> None:
    from transformers import pipeline

    path = change_task(tiny_model_file, tmp_path / "model.safetensors", task)
    export(path, "huggingface", tmp_path / "out")
    names = load_bundle(path).class_names
    images = [tmp_path / "china.png", tmp_path / "flower.png"]
    for image, pixels in zip(images, load_sample_images().images, strict=True):
        Image.fromarray(pixels).save(image)
    found = pipeline("image-classification", model=str(tmp_path / "out"), trust_remote_code=True)
    expected = vit.predict(path, images, top_k=4, precision="float32").predictions
    for rows, prediction in zip(
        found([str(image) for image in images], top_k=4), expected, strict=True
    ):
        assert [row["label"] for row in rows] == [name for _, name, _ in prediction.classes]
        scores = [probability for _, _, probability in prediction.classes]
        assert [row["score"] for row in rows] == pytest.approx(scores, abs=1e-5)
        if task == "classes":
            assert "predicted" not in rows[0]
            continue
        chosen = {row["label"] for row in rows if row["predicted"]}
        labels = prediction.labels
        shown = {row["label"] for row in rows}
        assert chosen == ({rows[0]["label"]} if labels is None else set(labels) & shown)
    # its loss is that of the task
    targets = torch.eye(len(names))[:1] if "labels" in task else torch.tensor([0])
    logits = torch.linspace(-1, 1, len(names))[None]
    found.model.vit.forward = lambda pixels: logits * found.model.config.logit_temperature
    loss = found.model(pixel_values=torch.zeros(1), labels=targets).loss
    losses = nn.BCEWithLogitsLoss() if "labels" in task else nn.CrossEntropyLoss()
    assert float(loss) == pytest.approx(float(losses(logits, targets)), rel=1e-6)


# beside the folder of tests/export/test_onnx_folder.py, which has another stem
@pytest.mark.extended
def test_onnx_runs_any_number_of_images_with_equal_probabilities(
    save: Save, export: Export, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path, model = save(stem="conv", mlp="relu2")
    outcome = export(path, "onnx", tmp_path / "out")
    assert len(outcome.out.splitlines()) == 1
    assert outcome.err == ""
    assert tuple(capfd.readouterr()) == ("", "")  # nor from beside Python's own streams
    session = onnxruntime.InferenceSession(tmp_path / "out" / "model.onnx")
    bundle, photo = load_bundle(path), load_sample_images().images[0]
    expected = model(bundle.preprocess([Image.fromarray(photo)])).softmax(dim=1)
    for count in (1, 2, 5):
        (found,) = session.run(["probabilities"], {"images": np.stack([photo] * count)})
        np.testing.assert_allclose(found, expected.detach().expand(count, -1), atol=1e-5)
    facts = json.loads((tmp_path / "out" / "model.json").read_text())
    assert facts["class_names"] == list(NAMES)
    assert Preprocess.from_dict(facts["preprocess"]) == bundle.preprocess


def test_onnx_without_its_packages_says_what_to_install(
    cli: Launcher, save: Save, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = save()
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "'.[export]'" in cli.fail(
        "export", path, "--format", "onnx", "--output", tmp_path / "out"
    )


def test_an_earlier_export_is_replaced_only_when_asked(
    cli: Launcher, save: Save, export: Export, tmp_path: Path
) -> None:
    path, _ = save()
    export(path, "timm", tmp_path / "out")
    assert "--overwrite" in cli.fail(
        "export", path, "--format", "timm", "--output", tmp_path / "out"
    )
    export(path, "timm", tmp_path / "out", "--overwrite")
