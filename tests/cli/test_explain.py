"""`vit explain` on images of every kind."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Launcher, Outcome, SaveModel


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return save_model(path, class_names=tuple("0123456789"), config={"data": {"name": "digits"}})


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """Images as they come: grey, palette, transparent, 16-bit, turned by EXIF; and one broken."""
    folder = tmp_path / "photos"
    folder.mkdir()
    pixels = np.random.default_rng(0).integers(0, 256, (24, 36), dtype=np.uint8)
    Image.fromarray(pixels).save(folder / "grey.png")
    Image.fromarray(pixels).convert("P").save(folder / "palette.png")
    Image.fromarray(pixels).convert("RGBA").save(folder / "transparent.webp")
    Image.fromarray(pixels.astype(np.uint16) * 257).save(folder / "deep.png")
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90°
    Image.fromarray(pixels).convert("RGB").save(folder / "turned.jpg", exif=exif)
    (folder / "broken.jpg").write_bytes((folder / "turned.jpg").read_bytes()[:300])
    return folder


Explain = Callable[..., Outcome]


@pytest.fixture
def explain(cli: Launcher) -> Explain:
    return lambda *arguments: cli.succeed("explain", *arguments)


def test_images_of_every_kind_are_explained_and_the_broken_one_named(
    explain: Explain, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    outcome = explain(model_file, photos, "--output", tmp_path / "out")
    # the model of 8 bits refuses the deep one
    assert "images explained: 4; skipped: 2" in outcome.text
    assert "broken.jpg" in outcome.text
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    sizes = {Path(entry["path"]).stem: entry["size"] for entry in manifest["images"]}
    assert sizes["turned"] == [24, 36]  # upright
    assert sizes["grey"] == [36, 24]
    for name in sizes:
        assert (tmp_path / "out" / f"{name}.rollout.png").is_file()
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        assert arrays["grey.rollout"].shape == (4, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "rolout"], "unknown method 'rolout'; known: gae"),
        (["--class", "wolf"], "unknown class 'wolf'"),
        (
            ["--class", "1", "--method", "rollout"],
            "rollout: the same map for every class, so --class 1 changes nothing; leave it out",
        ),
        (
            ["--format", "gif"],
            "unknown --format 'gif'; known: html, npz, pdf, png, svg",
        ),
        (
            ["--num-images", "3"],
            "num_images has no effect on images that are named; leave it out",
        ),
    ],
)
def test_mistakes_get_a_sentence_and_leave_nothing_behind(
    cli: Launcher,
    model_file: Path,
    photos: Path,
    tmp_path: Path,
    arguments: list[str],
    message: str,
) -> None:
    assert re.search(
        message, cli.fail("explain", model_file, photos, "--output", tmp_path / "out", *arguments)
    )
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_nothing_but_broken_images_is_an_error(
    cli: Launcher, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    outcome = cli.run("explain", model_file, photos / "broken.jpg", "--output", tmp_path / "out")
    assert outcome.code == 2
    assert "1 images can't be read; the first: " in outcome.err


def test_by_default_the_maps_of_the_first_sixteen_images_are_tested(
    explain: Explain, model_file: Path, tmp_path: Path
) -> None:
    arguments = ("--num-images", 17, "--method", "rollout", "--format", "npz")
    outcome = explain(model_file, *arguments, "--output", tmp_path / "out")
    assert "the maps of the first 16 images are tested; --checks tests all" in outcome.text
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    is_tested = [image["maps"][0]["sanity_check"] is not None for image in manifest["images"]]
    assert is_tested == [True] * 16 + [False]
    outcome = explain(model_file, *arguments, "--checks", "--output", tmp_path / "all")
    assert "the first 16" not in outcome.text
