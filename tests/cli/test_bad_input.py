"""Damaged files, hostile files and typing errors: the command ends soon, in little memory, with one line
and exit code 2, or with the right result. Never with a traceback or silently with a wrong result."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import vit
from tests.conftest import Launcher, SaveModel, change_metadata, save_noise
from vit.bundle import load_bundle
from vit.data.images import list_images, read_image
from vit.data.open import open_dataset
from vit.model.model_file import read_model_file


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return save_model(path, class_names=("ant", "bee", "cow"), config={"data": {"name": "digits"}})


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    return save_noise(tmp_path, ["photo.png"])[0]


@pytest.fixture(autouse=True)
def within_a_minute() -> Any:
    """A hang fails the test instead of stopping the suite."""

    def stop(*_: object) -> None:
        raise TimeoutError("this took more than a minute")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


class TestImages:
    def test_a_format_that_starts_programs_is_not_opened(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        started: list[object] = []
        monkeypatch.setattr(
            "PIL.EpsImagePlugin.Ghostscript", lambda *arguments, **_: started.append(arguments)
        )
        script = (
            "%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n%%EndComments\nshowpage\n%%EOF\n"
        )
        (tmp_path / "x.jpg").write_text(script)
        with pytest.raises(
            ValueError, match=r"x\.jpg can't be read as an image: it is not one of AVIF, BMP"
        ):
            read_image(tmp_path / "x.jpg")
        assert started == []

    @pytest.mark.parametrize("command", ["predict", "explain"])
    def test_a_folder_without_images_or_that_cannot_be_read_is_a_row_of_a_list(
        self,
        cli: Launcher,
        model_file: Path,
        photo: Path,
        tmp_path: Path,
        command: str,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        for name in ("empty", "secret"):
            (tmp_path / name).mkdir()
        scan = os.scandir

        def scandir(path: Any) -> Any:
            if "secret" in os.fspath(path):
                raise PermissionError(13, "Permission denied", path)
            return scan(path)

        monkeypatch.setattr(os, "scandir", scandir)
        listed = [tmp_path / "empty", photo, tmp_path / "secret"]
        output = ["--output", tmp_path / "maps", "--no-checks"] if command == "explain" else []
        out = cli.succeed(command, model_file, *listed, "--device", "cpu", *output).out
        assert out.count("is a folder that holds no images") == 2
        if output:
            assert (tmp_path / "maps" / "photo.rollout.png").is_file()
        else:
            assert ["error" in json.loads(line) for line in out.splitlines()] == [True, False, True]


class TestModelFiles:
    @pytest.mark.parametrize(
        ("place", "value"),
        [
            ("preprocess.mean", [float("nan"), 0, 0]),
            ("preprocess.std", [1, 1, 0]),
            ("preprocess.image_size", [10**9, 10**9]),
            ("architecture.depth", 10**9),
            ("architecture.embed_dim", 10**9),
            ("architecture.img_size", [4096, 4096]),
            ("architecture.more", 1),
            ("class_names", 3),
            ("class_names", ["one"]),
            ("config", [1]),
            ("data", "folder"),
        ],
        ids=str,
    )
    def test_impossible_metadata_is_refused(
        self,
        cli: Launcher,
        model_file: Path,
        photo: Path,
        tmp_path: Path,
        place: str,
        value: object,
    ) -> None:
        section, _, key = place.partition(".")
        if key:
            value = {**read_model_file(model_file).metadata[section], key: value}
        path = tmp_path / "model.safetensors"
        change_metadata(model_file, {section: value}, target=path)
        for command in (["info"], ["predict"]):
            images = [photo, "--device", "cpu"] if command == ["predict"] else []
            cli.fail(*command, path, *images)

    def test_every_changed_byte_is_noticed(self, model_file: Path, tmp_path: Path) -> None:
        content, path = model_file.read_bytes(), tmp_path / "m.safetensors"
        rng = np.random.default_rng(0)
        for place in rng.choice(len(content), 150, replace=False).tolist():
            path.write_bytes(
                content[:place]
                + bytes([content[place] ^ (1 << int(rng.integers(8)))])
                + content[place + 1 :]
            )
            with pytest.raises(ValueError, match=r"m\.safetensors"):
                load_bundle(path)


class TestDataSets:
    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        names = [f"{name}/{number}.png" for name in ("cat", "dog") for number in range(5)]
        save_noise(tmp_path / "images", names, size=(8, 8))
        return tmp_path / "images"

    def test_a_link_to_its_own_parent_is_not_followed(self, root: Path) -> None:
        (root / "cat" / "loop").symlink_to("..")
        assert len(open_dataset("folder", root=root).split("all")) == 10
        assert len(list(list_images(root))) == 10


class TestCommand:
    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["predict", "m", "x", "--devise", "cpu"], "--device"),
            (["trian"], "'train'"),
            (["train"], "which configuration?"),
            (["predict", "m", "x", "--top-k", "x"], "--top-k"),
            (["info", "a", "b"], "b"),
        ],
        ids=lambda value: " ".join(value) if isinstance(value, list) else "",
    )
    def test_a_slip_of_the_keyboard_is_one_line_with_the_nearest(
        self, cli: Launcher, arguments: list[str], message: str
    ) -> None:
        assert message in cli.fail(*arguments)

    def test_an_internal_error_is_one_line(
        self, cli: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise KeyError("broken")

        monkeypatch.setattr("vit.bundle.load_bundle", fail)
        outcome = cli.run("info", "imagenette")
        assert outcome.code == 70
        text = "internal error, a bug in vit: KeyError: 'broken'; VIT_DEBUG=1 shows where"
        assert outcome.err == f"vit: error: {text}\n"

    def test_too_little_memory_is_a_user_error(
        self, cli: Launcher, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def fail(*_: object, **__: object) -> None:
            raise MemoryError

        monkeypatch.setattr("vit.bundle.load_bundle", fail)
        assert "not enough memory" in cli.fail("info", "imagenette")


def test_the_version_needs_no_command(cli: Launcher) -> None:
    assert cli.succeed("--version").out == f"vit {vit.__version__}\n"
    assert "Missing command" in cli.fail("--")
