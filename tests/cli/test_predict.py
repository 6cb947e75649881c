"""`vit predict` as a person meets it: lines on standard output, everything else on standard error."""

import csv
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from vit.bundle import save_bundle, update_metadata
from vit.cli.main import main
from vit.data.images import Preprocess
from vit.model.vision_transformer import VisionTransformer


@pytest.fixture(scope="module")
def model_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    model = VisionTransformer(img_size=16, patch_size=4, num_classes=3, embed_dim=16, depth=1, num_heads=2)
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn_like(parameter)
    path = tmp_path_factory.mktemp("model") / "model.safetensors"
    names = ("bee", "cat, tabby", "dog")
    save_bundle(path, model, preprocess=Preprocess((16, 16)), class_names=names, config={}, data={})
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for name in ("b.png", "a.jpg", "c d.webp"):
        Image.fromarray(rng.integers(0, 256, (20, 30, 3), dtype=np.uint8)).save(folder / name)
    (folder / "broken.png").write_bytes((folder / "b.png").read_bytes()[:200])
    return folder


def run(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = 0
    try:
        main(["predict", *map(str, arguments), "--device", "cpu", "--precision", "float32"])
    except SystemExit as end:
        code = int(end.code or 0)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_lines_of_a_folder_in_order(
    capsys: pytest.CaptureFixture[str], model_file: Path, folder: Path
) -> None:
    code, out, err = run(capsys, model_file, folder, "--top-k", "2")
    lines = [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert [Path(line["path"]).name for line in lines] == ["a.jpg", "b.png", "broken.png", "c d.webp"]
    assert "can't be read" in lines[2]["error"]
    assert [len(line.get("predictions", [])) for line in lines] == [2, 2, 0, 2]
    assert "1 of 4 images could not be read" in err


def test_csv_reads_as_csv(capsys: pytest.CaptureFixture[str], model_file: Path, folder: Path) -> None:
    _, out, _ = run(capsys, model_file, folder / "a.jpg", folder / "broken.png", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert [row["rank"] for row in rows] == ["1", "2", "3", ""]
    assert sum(float(row["probability"]) for row in rows[:3]) == pytest.approx(1)
    assert {row["name"] for row in rows[:3]} == {"bee", "cat, tabby", "dog"}
    assert rows[3]["error"]


def test_the_temperature_of_the_model_is_used(
    capsys: pytest.CaptureFixture[str], model_file: Path, folder: Path, tmp_path: Path
) -> None:
    hot = tmp_path / "hot.safetensors"
    hot.write_bytes(model_file.read_bytes())
    update_metadata(hot, temperature=50.0)
    tops = []
    for path in (model_file, hot):
        _, out, _ = run(capsys, path, folder / "a.jpg")
        tops.append(json.loads(out)["predictions"][0]["probability"])
    assert tops[1] == pytest.approx(1 / 3, abs=0.05)
    assert tops[0] > tops[1]


def test_a_list_on_standard_input_goes_through_a_pipe(model_file: Path, folder: Path) -> None:
    """As a separate program: standard output holds the lines and nothing else."""
    command = [sys.executable, "-m", "vit", "predict", str(model_file), "-", "--device", "cpu"]
    listed = f"{folder}/c d.webp\n{folder}/gone.png\n{folder}/a.jpg\n"
    done = subprocess.run(command, input=listed, capture_output=True, text=True, env=os.environ, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert [line["path"] for line in lines] == listed.splitlines()
    assert lines[1]["error"] == "No such file or directory"


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes are Linux's")
def test_a_name_that_is_no_text_passes_through(model_file: Path, folder: Path) -> None:
    name = os.fsencode(folder) + b"/caf\xe9.png"
    Path(os.fsdecode(name)).write_bytes((folder / "b.png").read_bytes())
    try:
        for kind in ("jsonl", "csv"):
            command = [
                sys.executable,
                "-m",
                "vit",
                "predict",
                str(model_file),
                "-",
                "--device",
                "cpu",
                "--format",
                kind,
            ]
            done = subprocess.run(
                command, input=name + b"\n", capture_output=True, env=os.environ, check=False
            )
            assert done.returncode == 0, done.stderr
            assert b"caf\xe9.png" in done.stdout or rb"caf\udce9.png" in done.stdout
    finally:
        os.unlink(name)


def test_nothing_to_predict_is_an_error(
    capsys: pytest.CaptureFixture[str], model_file: Path, tmp_path: Path
) -> None:
    code, out, err = run(capsys, model_file, tmp_path)
    assert (code, out) == (2, "")
    assert "holds no images" in err
