"""Files that once broke something (tests/fuzz/corpus), given to what reads them."""

import io
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from tests.conftest import TINY_RUN, Launcher
from vit.data.cache import decode_dataset
from vit.data.images import read_image
from vit.data.open import open_dataset
from vit.model.checkpoint import CheckpointStore, serialize_state
from vit.runtime.metrics_file import load_metrics

CORPUS = Path(__file__).parents[1] / "fuzz" / "corpus"


def find(pattern: str) -> Any:
    paths = sorted(CORPUS.glob(pattern))
    assert paths, pattern
    return pytest.mark.parametrize(
        "path", paths, ids=[str(path.relative_to(CORPUS)) for path in paths]
    )


def test_the_corpus_stays_small() -> None:
    assert sum(path.stat().st_size for path in CORPUS.rglob("*") if path.is_file()) < 200_000


@find("configurations/*")
def test_a_configuration_is_refused_in_one_line(cli: Launcher, path: Path, tmp_path: Path) -> None:
    text = path.read_text()
    tiny = [each for each in TINY_RUN if each.split("=")[0].split(".")[1] not in text]
    cli.fail("train", path, *tiny, "--dry-run", "--output", tmp_path / "run")


@find("images/*")
def test_an_image_is_a_row_with_an_error(
    cli: Launcher, path: Path, tiny_model_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "PIL.EpsImagePlugin.Ghostscript", lambda *_, **__: pytest.fail("a program is started")
    )
    outcome = cli.run("predict", tiny_model_file, path, "--device", "cpu")
    # no image could be read
    assert outcome.code == 1
    (line,) = outcome.out.splitlines()
    error = json.loads(line)["error"]
    assert path.name in error
    assert "0x" not in error


@find("large/*")
def test_a_large_image_is_read(path: Path) -> None:
    image = read_image(path)
    assert (image.mode, image.size, image.getpixel((5, 5))) == ("RGB", (5000, 5000), (18, 18, 18))


@find("models/*")
def test_a_model_file_is_refused_in_one_line(cli: Launcher, path: Path, tmp_path: Path) -> None:
    if path.stem == "whole":
        assert "[/]" in cli.succeed("info", path).out
        return
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    cli.fail("predict", path, tmp_path / "a.png", "--device", "cpu")
    cli.fail("info", path)


@find("shards/*")
def test_a_shard_is_refused_in_one_line(cli: Launcher, path: Path, tmp_path: Path) -> None:
    shutil.copy(path, tmp_path)
    data = ["data.name=webdataset", f"data.root={tmp_path / path.name}"]
    tiny = [text for text in TINY_RUN if not text.startswith("data.name")]
    (tmp_path / "empty.yaml").touch()
    cli.fail("train", tmp_path / "empty.yaml", *tiny, *data, "--output", tmp_path / "run")


@find("checkpoints/*")
def test_a_checkpoint_is_passed_over(path: Path, tmp_path: Path) -> None:
    store, said = CheckpointStore(tmp_path), list[str]()
    store.save(serialize_state({"value": torch.tensor(1)}), step=1, best_step=1)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    found = store.load_latest(warn=said.append)
    assert found is not None
    assert int(found["value"]) == 1
    assert len(said) == 1


@find("results/*/index.*")
def test_an_index_of_the_cache_is_built_again(path: Path, tmp_path: Path) -> None:
    source = open_dataset("digits").split("validation")
    options: dict[str, Any] = {"size": (8, 8), "cache_dir": tmp_path, "progress": False}
    whole = decode_dataset(source, **options)
    (folder,) = (entry for entry in tmp_path.iterdir() if entry.is_dir())
    shutil.copy(path, folder)
    with pytest.warns(UserWarning, match="is damaged; it is made again"):
        assert decode_dataset(source, **options).fingerprint == whole.fingerprint
    assert (folder / path.name).read_bytes() != path.read_bytes()


@find("results/*/ma*")
def test_an_export_is_not_continued(
    cli: Launcher, path: Path, tiny_model_file: Path, tmp_path: Path
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    command = [
        "attention",
        tiny_model_file,
        tmp_path / "a.png",
        "--device",
        "cpu",
        "--output",
        tmp_path / "maps",
    ]
    cli.succeed(*command, "--no-checks")
    shutil.copy(path, tmp_path / "maps")
    cli.fail(*command, "--no-checks", "--resume")


@find("results/*/metrics.jsonl")
def test_a_line_of_the_metrics_is_named(path: Path) -> None:
    with pytest.raises(ValueError, match=r"metrics\.jsonl line 1"):
        load_metrics(path)


@find("lists/*")
def test_a_list_is_worked_through(
    cli: Launcher,
    path: Path,
    tiny_model_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    monkeypatch.setattr(sys, "stdin", io.StringIO(path.read_text() + f"{tmp_path / 'a.png'}\n"))
    lines = cli.succeed("predict", tiny_model_file, "-", "--device", "cpu").out.splitlines()
    assert ["error" in json.loads(line) for line in lines] == [True, False]
