"""Whatever names a model is opened by every function and command: modules of each library, names,
folders, checkpoints of other trainers, files and runs of this project."""

import argparse
import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
import torchvision
import transformers
from PIL import Image
from safetensors.torch import save_file
from torch import nn

import vit
from tests.conftest import Launcher, save_noise
from vit.model.vision_transformer import VisionTransformer

# three classes, images of 32 pixels, 64 channels for each of three heads as in the published ViTs
NAMES = ("class 0", "class 1", "class 2")
SIZES = {"img_size": 32, "patch_size": 8, "depth": 2, "num_classes": 3}
_TIMM_NAME = "vit_tiny_patch16_224"

pytestmark = pytest.mark.filterwarnings("ignore:.*how many attention heads")


class Own(nn.Module):
    """A module that tells neither its classes nor its image size."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 24, 8, 8)
        layer = nn.TransformerEncoderLayer(24, 2, 48, batch_first=True, dropout=0.0)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(24, 3)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        tokens = self.encoder(self.patches(images).flatten(2).transpose(1, 2))
        logits: torch.Tensor = self.head(tokens.mean(dim=1))
        return logits


def build_ours() -> VisionTransformer:
    return VisionTransformer(**SIZES, embed_dim=192, num_heads=3)


def build_timm() -> nn.Module:
    module: nn.Module = timm.create_model(_TIMM_NAME, pretrained=False, **SIZES)
    return module


def build_torchvision() -> nn.Module:
    return torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=2, num_heads=3, hidden_dim=192, mlp_dim=384,
        num_classes=3,
    )  # fmt: skip


def build_huggingface() -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=192, num_hidden_layers=2, num_attention_heads=3, intermediate_size=384,
        image_size=32, patch_size=8, id2label=dict(enumerate(NAMES)),
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODULES: dict[str, Callable[[], nn.Module]] = {
    "ours": build_ours,
    "timm's": build_timm,
    "torchvision's": build_torchvision,
    "Hugging Face's": build_huggingface,
    "own": Own,
}


def save_timm_folder(folder: Path) -> Path:
    arguments = {name: SIZES[name] for name in ("img_size", "patch_size", "depth")}
    timm.models.save_for_hf(build_timm(), folder, model_args=arguments)
    return folder


def save_huggingface_folder(folder: Path) -> Path:
    build_huggingface().save_pretrained(folder)
    return folder


def save_timm_checkpoint(folder: Path) -> Path:
    path = folder / "model_best.pth.tar"
    options = argparse.Namespace(model=_TIMM_NAME)
    content = {"epoch": 3, "arch": _TIMM_NAME, "args": options}
    torch.save({**content, "state_dict": build_timm().state_dict()}, path)
    return path


def save_weights_of_a_script(folder: Path) -> Path:
    torch.save({"model": build_ours().state_dict()}, folder / "weights.pth")
    return folder / "weights.pth"


def save_lightning_checkpoint(folder: Path) -> Path:
    weights = {f"net.{name}": value for name, value in build_ours().state_dict().items()}
    content = {"pytorch-lightning_version": "2.6.6", "state_dict": weights}
    torch.save(content, folder / "last.ckpt")
    return folder / "last.ckpt"


def save_bare_weights(folder: Path) -> Path:
    save_file(build_ours().state_dict(), folder / "bare.safetensors")
    return folder / "bare.safetensors"


def save_model_file(folder: Path) -> Path:
    vit.Bundle.from_model(build_ours()).save(folder / "model.safetensors")
    return folder / "model.safetensors"


PATHS: dict[str, Callable[[Path], str | Path]] = {
    "a timm name": lambda _: f"timm:{_TIMM_NAME}",
    "a timm folder": save_timm_folder,
    "a Hugging Face folder": save_huggingface_folder,
    "timm's checkpoint": save_timm_checkpoint,
    "weights of a script": save_weights_of_a_script,
    "Lightning's checkpoint": save_lightning_checkpoint,
    "bare weights": save_bare_weights,
    "a model file": save_model_file,
    "a run": lambda folder: save_model_file(folder).parent,
}


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("photos")
    names = [f"{NAMES[number % 3]}/{number}.png" for number in range(12)]
    save_noise(folder, names, size=(40, 32))
    return folder


@pytest.fixture
def small_timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A name in timm builds a small model, whose weights needn't be downloaded."""
    create = timm.create_model

    def create_small(name: str, pretrained: bool = False, **options: Any) -> nn.Module:
        if name == _TIMM_NAME:
            pretrained, options = False, {**SIZES, **options}
        module: nn.Module = create(name, pretrained=pretrained, **options)
        return module

    monkeypatch.setattr(timm, "create_model", create_small)


@pytest.fixture
def model(
    request: pytest.FixtureRequest, tmp_path: Path, small_timm: None
) -> nn.Module | vit.Bundle | str | Path:
    torch.manual_seed(0)
    if build := MODULES.get(request.param):
        module = build()
        for parameter in module.parameters():  # torchvision's head is zero before training
            parameter.data += 0.02 * torch.randn_like(parameter)
        if not isinstance(module, Own):
            return module
        return vit.Bundle.from_model(module, class_names=NAMES, preprocess=vit.Preprocess((32, 32)))
    return PATHS[request.param](tmp_path)


def list_files(photos: Path) -> list[Path]:
    return sorted(photos.rglob("*.png"))


def measure_faithfulness(model: Any, photos: Path, folder: Path) -> None:
    files = list_files(photos)
    predicted = vit.predict(model, files).predictions
    # enough images have to be predicted correctly
    known = [
        (np.asarray(Image.open(file).convert("RGB")), each.classes[0][0])
        for file, each in zip(files, predicted, strict=True)
    ]
    result = vit.measure_faithfulness(model, dataset=known, methods="rollout", num_images=8)
    assert any("rollout" in row[0] for row in result.rows)


def evaluate(model: Any, photos: Path, folder: Path) -> None:
    result = vit.evaluate(model, data=photos, split="all", num_examples=0)
    assert result.evaluation.num_images == 12
    result.save(folder / "evaluation")


def attribute(model: Any, photos: Path, folder: Path) -> None:
    assert vit.attribute(model, torch.randn(2, 3, 32, 32), method="rollout").shape == (2, 4, 4)
    assert vit.attribute(model, torch.randn(2, 3, 32, 32)).shape == (2, 4, 4)


def has_features(model: Any) -> bool:
    """Features are known for vit's and timm's models."""
    if isinstance(model, vit.Bundle):
        model = model.model
    return not isinstance(model, nn.Module) or isinstance(
        model, VisionTransformer | timm.models.VisionTransformer
    )


def embed(model: Any, photos: Path, folder: Path) -> None:
    if not has_features(model):
        with pytest.raises(ValueError, match=r"features of .* are unknown; models of vit and timm"):
            vit.embed(model, list_files(photos))
        return
    assert vit.embed(model, list_files(photos)).shape == (12, 192)


def audit(model: Any, photos: Path, folder: Path) -> None:
    if not has_features(model):
        with pytest.raises(ValueError, match=r"features of .* are unknown; models of vit and timm"):
            vit.audit(photos, model=model)
        return
    vit.audit(photos, model=model)


FUNCTIONS: dict[str, Callable[[Any, Path, Path], object]] = {
    "attribute": attribute,
    "audit": audit,
    "embed": embed,
    "evaluate": evaluate,
    "explain": lambda model, photos, folder: vit.explain(
        model, list_files(photos)[:2], methods="rollout", checks=False
    ),
    "faithfulness": measure_faithfulness,
    "predict": lambda model, photos, _: vit.predict(model, photos),
    "Predictor": lambda model, photos, _: vit.Predictor(model)(list_files(photos)[:2]),
}


# a name or a path is opened by one function, whatever it names
_OPENED_ALIKE = [name for name in PATHS if name not in ("a timm name", "a model file")]


@pytest.mark.parametrize(
    ("model", "function"),
    [
        *itertools.product([*MODULES, "a timm name", "a model file"], FUNCTIONS),
        *itertools.product(_OPENED_ALIKE, ["attribute", "predict"]),
    ],
    indirect=["model"],
)
def test_every_function_takes_every_form_of_a_model(
    model: Any, function: str, photos: Path, tmp_path: Path
) -> None:
    FUNCTIONS[function](model, photos, tmp_path)


@pytest.fixture(params=PATHS)
def source(request: pytest.FixtureRequest, tmp_path: Path, small_timm: None) -> str | Path:
    torch.manual_seed(0)
    return PATHS[request.param](tmp_path)


# the other commands have the same door, and then minutes of work
def test_commands_take_every_name_of_a_model(
    cli: Launcher, source: str | Path, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # the model is open and its page is built when the server would start
    monkeypatch.setattr("uvicorn.Server.run", lambda server, sockets: None)
    cli.succeed("info", source)
    cli.succeed("predict", source, photos)
    cli.succeed("serve", source, "--port", 0)


@pytest.mark.extended
def test_training_starts_from_every_name_of_a_model(
    source: str | Path, photos: Path, tmp_path: Path
) -> None:
    run = vit.train(photos, init=source, output=tmp_path / "run", overrides=["train.max_steps=1"])
    assert len(run.bundle.class_names) == 3


@pytest.mark.parametrize("kind", PATHS)
def test_a_model_is_saved_as_a_file_that_computes_the_same(
    kind: str, tmp_path: Path, small_timm: None
) -> None:
    bundle = vit.load_bundle(PATHS[kind](tmp_path))
    bundle.save(tmp_path / "saved.safetensors")
    saved = vit.load_bundle(tmp_path / "saved.safetensors")
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(saved.model(images), bundle.model(images))
    assert (saved.class_names, saved.preprocess) == (bundle.class_names, bundle.preprocess)


def test_a_module_that_no_file_rebuilds_is_not_saved(tmp_path: Path) -> None:
    bundle = vit.Bundle.from_model(build_torchvision())
    with pytest.raises(ValueError, match=r"can't be built again from a file; save its state_dict"):
        bundle.save(tmp_path / "model.safetensors")
    torch.save(bundle.model.state_dict(), tmp_path / "model.pth")
    with pytest.raises(ValueError, match=r"load_bundle\(path, model=…\)"):
        vit.load_bundle(tmp_path / "model.pth")
    fresh = build_torchvision()
    opened = vit.load_bundle(tmp_path / "model.pth", model=fresh)
    assert opened.model is fresh
    images = torch.randn(2, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(fresh(images), bundle.model(images))


def test_class_names_are_those_of_the_module(photos: Path, tmp_path: Path) -> None:
    """Photos whose folders have other names than the classes of a module."""
    animals = ("ant", "bee", "cow")
    for name, animal in zip(NAMES, animals, strict=True):
        (tmp_path / "animals").mkdir(exist_ok=True)
        (tmp_path / "animals" / animal).symlink_to(photos / name)
    path = save_weights_of_a_script(tmp_path)
    for model in (build_ours(), path):
        with pytest.raises(ValueError, match=r"the model doesn't know 'ant'.*class_names="):
            vit.evaluate(model, data=tmp_path / "animals", split="all")
        options = {"split": "all", "num_examples": 0, "class_names": animals}
        result = vit.evaluate(model, data=tmp_path / "animals", **options)
        assert result.bundle.class_names == animals
        maps = vit.attribute(
            model, torch.randn(1, 3, 32, 32), class_names=animals, target="bee", method="gae"
        )
        assert maps.shape == (1, 4, 4)


def test_no_random_number_of_the_caller_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As little as a GPU's own: without one, its generator is seeded by torch's function alone."""
    seeded: list[int] = []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeded.append)
    for save in (save_model_file, save_bare_weights, save_huggingface_folder):
        source = save(tmp_path)
        before = torch.get_rng_state()
        vit.load_bundle(source)
        assert torch.equal(torch.get_rng_state(), before)
    assert seeded == []


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"model": nn.Linear(2, 2)},
            r"more than tensors and plain values; save model\.state_dict\(\) alone",
        ),
        ({"state_dict": {"weight": torch.zeros(2)}}, r"vit\.load_bundle\(path, model=…\)"),
        ({"epoch": 3}, "has no tensors by name"),
    ],
)
def test_what_can_not_be_opened_says_what_to_do(
    cli: Launcher, tmp_path: Path, content: object, message: str
) -> None:
    torch.save(content, tmp_path / "model.pth")
    with pytest.raises(ValueError, match=message):
        vit.load_bundle(tmp_path / "model.pth")
    assert "train it again" not in cli.fail("info", tmp_path / "model.pth")


def test_a_folder_of_another_model_of_hugging_face_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "dinov2"}')
    with pytest.raises(ValueError, match=r"holds a dinov2.*pass its module from Python"):
        vit.load_bundle(tmp_path)
