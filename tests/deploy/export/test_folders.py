"""Folders for timm and transformers compute equal logits; the card of each export."""

from pathlib import Path
from typing import Any

import pytest
import timm
import torch
from PIL import Image
from sklearn.datasets import load_sample_images
from torch import nn

import vit
from tests.conftest import Launcher, SaveModel, change_metadata
from tests.deploy.conftest import TASKS, change_task
from vit.bundle import load_bundle
from vit.data.preprocess import Preprocess

NAMES = ("ant", "bee", "cow")
PREPROCESS = Preprocess((16, 16), crop_pct=0.5, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
FOR_TIMM: list[dict[str, Any]] = [
    {},
    {"global_pool": "avg", "pos_embed": "sincos"},
    {"global_pool": "avg", "reg_tokens": 2, "qk_norm": True, "class_token": True},
    {"init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True},
    {"global_pool": "avg", "fc_norm": False, "mlp_ratio": 2.55},
]
FOR_TRANSFORMERS: list[dict[str, Any]] = [
    {"init_values": 1e-5, "reg_tokens": 4, "no_embed_class": True},
    {"pos_embed": "sincos", "qkv_bias": False, "mlp_ratio": 2.55},
]


def save(save_model: SaveModel, path: Path, **options: Any) -> tuple[Path, nn.Module]:
    """Write a model file whose every parameter matters, with a temperature."""
    save_model(path, class_names=NAMES, preprocess=PREPROCESS, img_size=16, **options)
    change_metadata(path, {"temperature": 0.25})
    return path, load_bundle(path).model


@pytest.mark.parametrize("options", FOR_TIMM)
def test_timm_opens_the_folder_and_computes_equal_logits(
    save_model: SaveModel, options: dict[str, Any], tmp_path: Path
) -> None:
    path, model = save(save_model, tmp_path / "model.safetensors", **options)
    folder = vit.export_model(path, output=tmp_path / "out", format="timm")
    theirs = timm.create_model(f"local-dir:{folder}", pretrained=True).eval()
    images = torch.randn(3, 3, 16, 16)
    # the temperature is in the head
    torch.testing.assert_close(0.25 * theirs(images), model(images), atol=1e-5, rtol=0)
    config = timm.data.resolve_model_data_config(theirs)
    assert (tuple(config["input_size"]), config["crop_pct"]) == ((3, 16, 16), 0.5)
    assert [*config["mean"], *config["std"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert tuple(theirs.pretrained_cfg["label_names"]) == NAMES


@pytest.mark.parametrize("task", TASKS)
def test_what_was_exported_to_timm_comes_back(
    task: str, save_model: SaveModel, tmp_path: Path
) -> None:
    path, _ = save(save_model, tmp_path / "saved.safetensors")
    path = change_task(path, tmp_path / "model.safetensors", task)
    folder = vit.export_model(path, output=tmp_path / "out", format="timm")
    bundle = load_bundle(folder)
    photo = load_sample_images().images[0]
    found, expected = (
        {
            name: probability
            for _, name, probability in vit.predict(each, photo, precision="float32")
            .predictions[0]
            .classes
        }
        for each in (bundle, path)
    )
    assert found == pytest.approx(expected, abs=1e-6)
    assert bundle.is_multilabel == ("labels" in task)
    assert bundle.preprocess == load_bundle(path).preprocess


@pytest.mark.parametrize("options", FOR_TRANSFORMERS)
def test_transformers_opens_the_folder_and_computes_equal_logits(
    save_model: SaveModel, options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    path, model = save(save_model, tmp_path / "model.safetensors", **options)
    folder = vit.export_model(path, output=tmp_path / "out", format="timm")
    theirs = AutoModelForImageClassification.from_pretrained(folder)
    assert type(theirs).__module__.startswith("transformers.models.timm_wrapper")
    assert list(theirs.config.id2label.values()) == list(NAMES)
    # without resizing, which rounds sizes
    photo = Image.fromarray(load_sample_images().images[0]).resize((32, 32))
    images = PREPROCESS([photo])
    processor = AutoImageProcessor.from_pretrained(folder)
    given = processor(photo, return_tensors="pt")["pixel_values"]
    torch.testing.assert_close(given, images, atol=1e-6, rtol=0)
    torch.testing.assert_close(0.25 * theirs(images).logits, model(images), atol=1e-5, rtol=0)


def test_several_labels_are_sigmoids_in_a_pipeline_of_transformers(
    tiny_model_file: Path, tmp_path: Path
) -> None:
    from transformers import pipeline

    path = change_task(tiny_model_file, tmp_path / "model.safetensors", "labels")
    folder = vit.export_model(path, output=tmp_path / "out", format="timm")
    image = tmp_path / "china.png"
    size = load_bundle(path).preprocess.resize_size[0]
    Image.fromarray(load_sample_images().images[0]).resize((size, size)).save(image)
    classify = pipeline("image-classification", model=str(folder))
    expected = vit.predict(path, str(image), top_k=10, precision="float32").predictions[0]
    assert {row["label"]: row["score"] for row in classify(str(image), top_k=10)} == pytest.approx(
        {name: probability for _, name, probability in expected.classes}, abs=1e-5
    )


@pytest.mark.parametrize(
    ("options", "preprocess"),
    [
        ({"stem": "conv"}, PREPROCESS),
        ({"mlp": "relu2"}, PREPROCESS),
        ({}, Preprocess((16, 16), resize_mode="stretch")),
        ({}, Preprocess((16, 16), value_range=(0, 4095))),
    ],
)
def test_what_timm_cannot_compute_is_refused_with_a_way_out(
    options: dict[str, Any],
    preprocess: Preprocess,
    save_model: SaveModel,
    cli: Launcher,
    tmp_path: Path,
) -> None:
    path = save_model(tmp_path / "model.safetensors", preprocess=preprocess, **options)
    told = cli.fail("export", path, "--format", "timm", "--output", tmp_path / "out")
    assert "--format onnx" in told
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("task", "sentence"),
    [
        ("class from a threshold", "`1` 0.2; below it, the most probable of the other classes."),
        ("labels", "A label is predicted from a probability of 0.5."),
        ("labels from thresholds", "`0` 0.3, `2` 0.7; other labels from 0.5."),
    ],
)
def test_the_card_says_what_is_predicted(
    task: str, sentence: str, tiny_model_file: Path, tmp_path: Path
) -> None:
    path = change_task(tiny_model_file, tmp_path / "model.safetensors", task)
    card = vit.export_model(path, format="timm", output=tmp_path / "out") / "README.md"
    assert sentence in card.read_text()


def test_the_card_has_the_accuracy_of_an_evaluation_beside_the_run(
    tiny_run: Path, tmp_path: Path
) -> None:
    (tmp_path / "digits").symlink_to(tiny_run)
    result = vit.evaluate(tmp_path / "digits", precision="float32")
    result.save(tmp_path / "evaluation")
    folder = vit.export_model(tmp_path / "digits", output=tmp_path / "out", format="timm")
    card = (folder / "README.md").read_text()
    assert load_bundle(tmp_path / "digits").sha256 in card
    for title, value, interval in result.evaluation.list_rows():
        assert f"| {title} | {value} | {interval} |" in card


def test_text_of_a_model_file_is_no_markup_in_its_card(
    save_model: SaveModel, tmp_path: Path
) -> None:
    markup = "<img src=x onerror=alert(1)> [x](javascript:y)\n# z"
    splits = {markup: {"num_images": 1, "fingerprint": ""}}
    names = ("a`b", markup, "{{ e }}")
    data = {"name": markup, "splits": splits}
    path = save_model(tmp_path / "model.safetensors", data=data, class_names=names)
    change_metadata(path, {"limits": markup})
    folder = vit.export_model(path, format="timm", output=tmp_path / "out")
    card = (folder / "README.md").read_text()
    quoted = "`<img src=x onerror=alert(1)> [x](javascript:y) # z`"
    assert f"`a'b`, {quoted}, `{{{{ e }}}}`" in card
    assert card.count(r"\<img src=x onerror=alert(1)\> \[x\](javascript:y) # z") == 2
    assert "<img" not in card.replace(r"\<img", "").replace(quoted, "")
