"""`vit export`: other programs compute the same logits."""

import importlib
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
from vit.deploy.export.python_formats import write_program
from vit.model.attention import centre_keys

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
# what transformers has
FOR_TRANSFORMERS: list[dict[str, Any]] = [
    {},
    {"pos_embed": "sincos", "qkv_bias": False, "mlp_ratio": 2.55},
    {"init_values": 0.1, "global_pool": "avg", "class_token": True, "fc_norm": False},
    {"init_values": 0.1, "reg_tokens": 4, "no_embed_class": True},
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
    update_metadata(path, {"temperature": 0.25})
    export(path, "timm", tmp_path / "out")
    theirs = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    images = torch.randn(3, 3, 8, 16)
    # the temperature is in the head, in both of a distilled model
    torch.testing.assert_close(0.25 * theirs(images), model(images), atol=1e-5, rtol=0)
    config = timm.data.resolve_model_data_config(theirs)
    assert (tuple(config["input_size"]), config["crop_pct"]) == ((3, 8, 16), 0.5)
    assert [*config["mean"], *config["std"]] == [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]
    assert config["interpolation"] == "bilinear"
    assert tuple(theirs.pretrained_cfg["label_names"]) == NAMES


def test_cards_of_the_packaged_model_and_of_one_without_classes(tmp_path: Path) -> None:
    folder = vit.export_model("imagenette", output=tmp_path / "packaged", format="timm")
    card = (folder / "README.md").read_text()
    assert "On 3,925 images, val/ of Imagenette v2: top-1 0.8848 (95 % interval 0.8744" in card
    assert "as `vit predict --precision float32` does" in card
    assert "python FOLDER/timm_vit.py validate.py" in card
    headless = timm.create_model("vit_tiny_patch16_224", num_classes=0, img_size=32, depth=1)
    for form, opened in (("timm", "timm.create_model("), ("huggingface", "transformers' own ViTM")):
        folder = vit.export_model(headless, output=tmp_path / form, format=form)
        card = (folder / "README.md").read_text()
        assert "# Vision transformer without a classifier" in card
        assert "pipeline_tag: image-feature-extraction" in card
        assert opened in card
        assert not any(text in card for text in ("classes", "## Accuracy", "\n\n\n"))


@pytest.mark.parametrize("task", TASKS)
def test_what_was_exported_to_timm_comes_back(
    task: str, save: Save, export: Export, tmp_path: Path
) -> None:
    path, model = save()
    path = change_task(path, tmp_path / "changed.safetensors", task)
    update_metadata(path, {"temperature": 0.5})
    export(path, "timm", tmp_path / "out")
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("problem_type" in config) == (task != "classes")
    assert config.get("operating_point", {}) == load_bundle(path).operating_point
    bundle = load_bundle(f"timm:local-dir:{tmp_path / 'out'}")
    images = torch.randn(3, 3, 8, 16)
    torch.testing.assert_close(0.5 * bundle.model(images), model(images), atol=1e-5, rtol=0)
    photo = load_sample_images().images[0]
    found, expected = (
        vit.predict(each, photo, top_k=4, precision="float32").predictions[0].classes
        for each in (bundle, path)
    )
    assert [name for _, name, _ in found] == [name for _, name, _ in expected]
    probabilities = [probability for *_, probability in expected]
    assert [probability for *_, probability in found] == pytest.approx(probabilities, abs=1e-6)
    assert bundle.class_names == NAMES
    assert bundle.is_multilabel == ("labels" in task)
    assert bundle.preprocess == load_bundle(path).preprocess


@pytest.mark.extended
def test_timm_opens_stems_with_the_file_beside_them(
    save: Save, export: Export, tmp_path: Path
) -> None:
    """In a process of its own, without vit."""
    images, expected = torch.randn(3, 3, 8, 16), []
    large = torch.randn(3, 3, 16, 32)
    for number, options in enumerate(WITH_CODE):
        path, model = save(**options)
        assert isinstance(model, vit.VisionTransformer)
        export(path, "timm", tmp_path / f"{number}")
        of_model = {"logits": model(images), "grids": [*model.forward_intermediates(images)][1]}
        of_model["grids"] = of_model["grids"][:, model.num_prefix_tokens :]
        # resampled as learned positions are
        model.pos_embed = nn.Parameter(model.pos_embed.detach())
        model.set_input_size((16, 32))
        expected.append({**of_model, "large": model(large), "dynamic": model(large)})
    np.savez(tmp_path / "images.npz", small=images, large=large)
    (tmp_path / "script.py").write_text(f"""import sys
sys.modules["vit"] = None
import numpy, timm, torch
images = numpy.load("images.npz")
small, large = torch.from_numpy(images["small"]), torch.from_numpy(images["large"])
for n in range({len(WITH_CODE)}):
    create = lambda **options: timm.create_model(f"local-dir:{{n}}", pretrained=True, **options).eval()
    model = create()
    assert timm.data.resolve_model_data_config(model)["crop_pct"] == 0.5
    with torch.no_grad():
        (grid,) = create(features_only=True, out_indices=(1,))(small)
        found = {{"logits": model(small), "grids": grid.flatten(2).transpose(1, 2)}}
        found["large"] = create(img_size=(16, 32))(large)
        found["dynamic"] = create(dynamic_img_size=True)(large)
    numpy.savez(f"{{n}}.npz", **found)
""")
    # as timm's own scripts, which import no file of the folder
    subprocess.run([sys.executable, "0/timm_vit.py", "script.py"], check=True, cwd=tmp_path)
    for number, of_model in enumerate(expected):
        found = np.load(tmp_path / f"{number}.npz")
        for name, values in of_model.items():
            # the grids' values are up to 50
            scale = max(float(values.detach().abs().max()) / 10, 1)
            np.testing.assert_allclose(found[name], values.detach(), atol=1e-5 * scale, rtol=0)


def test_exported_attention_centres_its_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does where torch may choose cuDNN's kernel, which the test pretends."""
    write_program(tmp_path / "timm_vit.py")
    monkeypatch.syspath_prepend(tmp_path)
    code = importlib.import_module("timm_vit")
    sizes = {"img_size": 16, "patch_size": (4, 4), "embed_dim": 24, "depth": 2, "num_heads": 3}
    keys: list[torch.Tensor] = []
    for qk_norm in (True, False):
        model = code.build(stem="conv", mlp="gelu", distilled=False, qk_norm=qk_norm, **sizes)
        for parameter in model.double().parameters():
            parameter.data += 0.2 * torch.randn_like(parameter)
        model.blocks[1].attn.k_norm.register_forward_hook(lambda *given: keys.append(given[2]))
        images, gradients = torch.randn(2, 3, 16, 16, dtype=torch.float64), []
        for centred in (False, True):
            monkeypatch.setattr(code, "may_use_cudnn", lambda key, centred=centred: centred)
            (loss := model(images).square().sum()).backward()
            gradients.append([loss, *(parameter.grad for parameter in model.parameters())])
            model.zero_grad()
        for value, of_centred in zip(*gradients, strict=True):
            scale = max(float(value.detach().abs().max()), 1)
            torch.testing.assert_close(of_centred, value, atol=1e-12 * scale, rtol=0)
    assert [bool(key.mean(dim=-2).abs().max() < 1e-12) for key in keys] == [False, True] * 2
    half = torch.randn(2, 3, 17, 8, dtype=torch.bfloat16)
    assert torch.equal(code.centre_keys(None, (), half), centre_keys(half))


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
    check_outputs(theirs, model, given["pixel_values"])


def check_outputs(theirs: Any, model: nn.Module, images: torch.Tensor) -> None:
    """Compare logits, attention and tokens with those of `model`, whose temperature is 2."""
    assert isinstance(model, vit.VisionTransformer)
    torch.testing.assert_close(theirs(images).logits, model(images) / 2, atol=1e-5, rtol=0)
    theirs.set_attn_implementation("eager")
    output = theirs(images, output_attentions=True, output_hidden_states=True)
    torch.testing.assert_close(output.logits, model(images) / 2, atol=1e-5, rtol=0)
    _, attentions = model.forward_with_attention(images)
    torch.testing.assert_close(output.attentions, tuple(attentions), atol=1e-5, rtol=0)
    tokens = tuple(model.forward_intermediates(images))
    torch.testing.assert_close(output.hidden_states[1:], tokens, atol=1e-4, rtol=0)
    assert theirs(images, return_dict=False)[0].equal(theirs(images).logits)


@pytest.mark.parametrize("options", FOR_TRANSFORMERS)
def test_plain_models_open_in_transformers_without_code(
    save_model: SaveModel, options: dict[str, Any], tmp_path: Path
) -> None:
    from transformers import AutoImageProcessor, AutoModelForImageClassification

    preprocess = Preprocess((16, 16), crop_pct=0.5, mean=(0.1, 0.2, 0.3), std=(0.4, 0.5, 0.6))
    path = save_model(tmp_path / "model.safetensors", preprocess=preprocess, **options)
    update_metadata(path, {"temperature": 2.0})
    folder = vit.export_model(path, output=tmp_path / "out", format="huggingface")
    theirs = AutoModelForImageClassification.from_pretrained(folder)
    assert type(theirs).__module__.startswith("transformers.models.")
    assert list(theirs.config.id2label.values()) == list(NAMES)
    photo = Image.fromarray(load_sample_images().images[0]).resize((32, 32))
    images = preprocess([photo])
    for trust in (False, True):  # theirs, without resizing, and the code of the folder
        processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=trust)
        assert (type(processor).__name__ == "ViTProcessor") == trust
        given = processor(photo, return_tensors="pt")["pixel_values"]
        torch.testing.assert_close(given, images, atol=1e-6, rtol=0)
    model = load_bundle(path).model
    check_outputs(theirs, model, images)
    if options.get("global_pool") != "avg":
        back = vit.load_timm(folder)
        torch.testing.assert_close(back(images), model(images) / 2, atol=1e-5, rtol=0)


def test_exported_code_fits_in_transformers(save: Save, export: Export, tmp_path: Path) -> None:
    """Other classes, features, and images as arrays and tensors."""
    from transformers import AutoImageProcessor, AutoModel, AutoModelForImageClassification

    path, model = save(stem="conv")
    assert isinstance(model, vit.VisionTransformer)
    export(path, "huggingface", tmp_path / "out")
    place: dict[str, Any] = {
        "pretrained_model_name_or_path": tmp_path / "out",
        "trust_remote_code": True,
    }
    tuned = AutoModelForImageClassification.from_pretrained(
        **place, num_labels=7, ignore_mismatched_sizes=True, attn_implementation="sdpa"
    )
    images = torch.randn(2, 3, 8, 16)
    assert tuned(images).logits.shape == (2, 7)
    assert 0 < float(tuned.vit.head.weight.detach().std()) < 0.1
    features = AutoModel.from_pretrained(**place, attn_implementation="eager")
    tokens = model.forward_features(images)
    output = features(images)
    assert [of.vit.blocks[0].attn.fused_attn for of in (features, tuned)] == [False, True]
    torch.testing.assert_close(output.last_hidden_state, tokens, atol=1e-5, rtol=0)
    pooled = model.pool(tokens, "token")
    torch.testing.assert_close(output.pooler_output, pooled, atol=1e-5, rtol=0)
    assert features.get_input_embeddings() is features.vit.patch_embed

    processor = AutoImageProcessor.from_pretrained(**place)
    pixels = load_sample_images().images[0][:60, :80]
    expected = processor(Image.fromarray(pixels))["pixel_values"]
    chw = pixels.transpose(2, 0, 1)
    tensor = torch.from_numpy(chw.copy())
    for given in (pixels, chw, tensor, tensor / 255, [tensor], tensor[None], pixels.tolist()):
        found = processor(given, return_tensors="np")["pixel_values"]
        np.testing.assert_array_equal(found, expected)
    strip = pixels[:3]  # either order of axes
    found = processor(strip, input_data_format="channels_first")["pixel_values"]
    np.testing.assert_array_equal(found, processor(strip.transpose(1, 2, 0))["pixel_values"])
    with pytest.raises(ValueError, match=r"float32 values are 0 to 1, not 172 to 242; scale"):
        processor(pixels.astype(np.float32))
    with pytest.raises(ValueError, match=r"or \[H, W\], not \[60, 80, 5\]"):
        processor(np.zeros((60, 80, 5)))


@pytest.mark.filterwarnings("ignore:16-bit images with values up to")
def test_exported_code_reads_images_as_vit_does(save: Save, export: Export, tmp_path: Path) -> None:
    from transformers import AutoImageProcessor, pipeline

    path, _ = save()
    export(path, "huggingface", tmp_path / "out")
    preprocess = load_bundle(path).preprocess
    processor = AutoImageProcessor.from_pretrained(tmp_path / "out", trust_remote_code=True)
    write_program(tmp_path / "predict.py")
    predict: dict[str, Any] = {}
    exec((tmp_path / "predict.py").read_text().partition("session = ")[0], predict)

    dicom = tmp_path / "a.dcm"
    dicom.write_bytes(bytes(128) + b"DICM")
    for read in (processor, predict["read_rgb"]):
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
            for read in (processor, predict["read_rgb"]):
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
        np.testing.assert_array_equal(predict["read_rgb"](image_path), pixels)
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
        # transformers' own pipeline takes what needs no threshold
        if "threshold" not in task:
            assert "predicted" not in rows[0]
            continue
        chosen = {row["label"] for row in rows if row["predicted"]}
        labels = prediction.labels
        shown = {row["label"] for row in rows}
        assert chosen == ({rows[0]["label"]} if labels is None else set(labels) & shown)
    # its loss is that of the task
    if "threshold" not in task:
        assert type(found.model).__module__.startswith("transformers.models.vit.")
        return
    targets = torch.eye(len(names))[:1] if "labels" in task else torch.tensor([0])
    logits = torch.linspace(-1, 1, len(names))[None]
    found.model.vit.forward_head = lambda tokens: logits
    loss = found.model(
        pixel_values=torch.zeros(1, 3, *load_bundle(path).preprocess.image_size), labels=targets
    ).loss
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
