"""`vit attention` on images of every kind."""

import io
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.conftest import Launcher, Outcome, SaveModel
from vit.explanation.methods.registry import list_methods


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


Attention = Callable[..., Outcome]


@pytest.fixture
def attention(cli: Launcher) -> Attention:
    return lambda *arguments: cli.succeed("attention", *arguments)


def test_images_of_every_kind_are_explained_and_the_broken_one_named(
    attention: Attention, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    outcome = attention(model_file, photos, "--output", tmp_path / "out")
    assert "5 images explained, 1 skipped" in outcome.text
    assert "broken.jpg" in outcome.text
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    sizes = {Path(entry["path"]).stem: entry["size"] for entry in manifest["images"]}
    assert sizes["turned"] == [24, 36]  # upright
    assert sizes["grey"] == [36, 24]
    for name in sizes:
        assert (tmp_path / "out" / f"{name}.rollout.png").is_file()
    with np.load(tmp_path / "out" / "maps.npz") as arrays:
        assert arrays["grey.rollout"].shape == (4, 4)


def test_without_images_it_takes_the_models_own_test_split(
    attention: Attention, model_file: Path, tmp_path: Path
) -> None:
    attention(model_file, "--num-images", 3, "--output", tmp_path / "out", "--no-checks")
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert len(manifest["images"]) == 3
    assert all(entry["name"].startswith("digits-") for entry in manifest["images"])


def test_every_format_is_written(
    attention: Attention, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    arguments = ("--format", "png,npz,html", "--method", "rollout,legrad", "--class", "3")
    attention(model_file, photos, "--output", tmp_path / "out", *arguments)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {
        "gallery.html",
        "maps.npz",
        "manifest.json",
        "grey.rollout.png",
        "grey.legrad.3.png",
    } <= names


def test_an_output_is_kept_unless_told_otherwise(
    cli: Launcher, attention: Attention, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    arguments = (model_file, photos / "grey.png", "--output", tmp_path / "out", "--no-checks")
    attention(*arguments)
    assert "--overwrite" in cli.fail("attention", *arguments)
    attention(*arguments, "--overwrite")


def test_resume_explains_only_what_is_missing(
    attention: Attention, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    output = tmp_path / "out"
    attention(model_file, photos / "grey.png", "--output", output, "--no-checks")
    first = (output / "grey.rollout.png").stat().st_mtime_ns
    attention(model_file, photos, "--output", output, "--no-checks", "--resume")
    assert (output / "grey.rollout.png").stat().st_mtime_ns == first
    assert len(json.loads((output / "manifest.json").read_text())["images"]) == 5
    with np.load(output / "maps.npz") as arrays:
        assert len(arrays.files) == 2 * 5  # rollout and libra-removal


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method", "rolout"], "unknown method 'rolout'; known: rollout"),
        (["--class", "wolf"], "unknown class 'wolf'"),
        (
            ["--class", "1", "--method", "rollout"],
            "rollout: the same map for every class, so --class 1 changes nothing; leave it out",
        ),
        (
            ["--format", "gif"],
            "unknown --format 'gif'; known: html, jpeg, npz, pdf, png, svg, webp",
        ),
        (["--option", "scale=log"], "unknown scale 'log'"),
        (["--option", "start_layer=7"], "start_layer 7 is outside 0 to 1"),
        (["--method", "raw", "--option", "head=first"], "head 'first': input should be .*'mean'"),
        (["--option", "residual=half"], "residual 'half': input should be a valid number"),
        (["--option", "max_side=-1"], "max_side -1 must be at least 0"),
        (["--option", "passes=2"], "passes is no option of the methods libra-removal, rollout"),
        (["--option", "residual"], "--option 'residual' is not NAME=VALUE"),
        (["--option", "methods=gae"], "methods is no option of the methods"),
        (["--option", "discard_ratio=1"], r"discard_ratio 1.0 is outside \[0, 1\)"),
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
        message, cli.fail("attention", model_file, photos, "--output", tmp_path / "out", *arguments)
    )
    assert not (tmp_path / "out" / "manifest.json").exists()


def test_nothing_but_broken_images_is_an_error(
    cli: Launcher, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    outcome = cli.run("attention", model_file, photos / "broken.jpg", "--output", tmp_path / "out")
    assert outcome.code == 2
    assert "none of the 1 images could be read" in outcome.err


def test_random_weights_give_another_map(
    attention: Attention, model_file: Path, photos: Path, tmp_path: Path
) -> None:
    maps = []
    for name, extra in (("trained", []), ("random", ["--option", "random_weights=true"])):
        attention(
            model_file, photos / "grey.png", "--output", tmp_path / name, "--no-checks", *extra
        )
        with np.load(tmp_path / name / "maps.npz") as arrays:
            maps.append(arrays["grey.rollout"])
    assert np.abs(maps[0] - maps[1]).max() > 1e-4


def test_the_help_names_every_method(attention: Attention) -> None:
    words = "".join(attention("--help").out.split())
    for method in list_methods():
        assert method in words.replace("│", "")


def test_attention_is_another_name_of_explain(cli: Launcher, attention: Attention) -> None:
    assert not re.search(r"^ *attention", cli.succeed("--help").out, flags=re.MULTILINE)
    usage = attention("--help").out.split()
    assert "attention" in usage[:5]
    assert usage[5:] == cli.succeed("explain", "--help").out.split()[5:]


def test_paths_are_read_from_standard_input(
    attention: Attention,
    model_file: Path,
    photos: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As `tests/cli/test_predict.py` does through a pipe, for another program."""
    output = tmp_path / "out"
    listed = f"{photos / 'grey.png'}\n{photos / 'deep.png'}\n".encode()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(listed)))
    attention(model_file, "-", "-o", output, "--no-checks", "--device", "cpu")
    manifest = json.loads((output / "manifest.json").read_text())
    assert [Path(image["path"]).name for image in manifest["images"]] == ["deep.png", "grey.png"]
