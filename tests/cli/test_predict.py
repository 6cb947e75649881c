"""`vit predict`: lines on standard output, everything else on standard error."""

import io
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import Launcher, Outcome, SaveModel, save_noise


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory, save_model: SaveModel) -> Path:
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    return save_model(path, class_names=("bee", "cat, tabby", "dog"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    save_noise(folder, ("b.png", "a.jpg", "c d.webp"))
    (folder / "broken.png").write_bytes((folder / "b.png").read_bytes()[:200])
    return folder


@pytest.fixture
def predict(cli: Launcher) -> Callable[..., Outcome]:
    return lambda *arguments: cli.run(
        "predict", *arguments, "--device", "cpu", "--precision", "float32"
    )


def test_json_lines_of_a_folder_in_order(
    predict: Callable[..., Outcome], model_file: Path, folder: Path
) -> None:
    code, out, err = predict(model_file, folder, "--top-k", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [Path(line["path"]).name for line in lines] == [
        "a.jpg",
        "b.png",
        "broken.png",
        "c d.webp",
    ]
    assert "can't be read" in lines[2]["error"]
    assert [len(line.get("predictions", [])) for line in lines] == [2, 2, 0, 2]
    assert "1 of 4 images could not be read" in err


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes are Linux's")
def test_a_name_that_is_no_text_passes_through(
    predict: Callable[..., Outcome],
    model_file: Path,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = os.fsencode(folder) + b"/caf\xe9.png"
    Path(os.fsdecode(name)).write_bytes((folder / "b.png").read_bytes())
    try:
        for arguments in ((), ("--output", tmp_path / "found.csv")):
            monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(name + b"\n"), "utf-8"))
            outcome = predict(model_file, "-", *arguments)
            assert outcome.code == 0
            out = os.fsencode(outcome.out)
            if arguments:
                out = (tmp_path / "found.csv").read_bytes()
            assert b"caf\xe9.png" in out or rb"caf\udce9.png" in out
    finally:
        os.unlink(name)


def test_nothing_to_predict_is_an_error(
    predict: Callable[..., Outcome], model_file: Path, tmp_path: Path
) -> None:
    code, out, err = predict(model_file, tmp_path)
    assert (code, out) == (2, "")
    assert "holds no images" in err


def test_no_image_that_can_be_read_is_exit_code_1(
    predict: Callable[..., Outcome], model_file: Path, tmp_path: Path
) -> None:
    (tmp_path / "broken.png").write_bytes(b"no picture")
    code, out, err = predict(model_file, tmp_path / "broken.png", tmp_path / "gone.png")
    assert code == 1
    assert len(out.splitlines()) == 2
    first = tmp_path / "broken.png"
    assert f"2 of 2 images could not be read, the first: {first}: " in err
