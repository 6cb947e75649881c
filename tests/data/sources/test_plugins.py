"""A package from outside adds a data source without a changed line here."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import vit
from tests.conftest import TINY_RUN
from vit.data.dataset import Request, SourceSplits
from vit.data.sources import registry

PLUGINS = Path(__file__).parents[2] / "plugins"


@pytest.fixture
def run_python(tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Runs Python in a fresh process that has the package installed."""

    def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
        path = os.pathsep.join([str(PLUGINS), str(PLUGINS.parents[1])])
        return subprocess.run(
            [sys.executable, *arguments],
            env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=300,
        )

    return run


def test_a_source_of_another_package_trains_by_name_and_by_place(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"], tmp_path: Path
) -> None:
    overrides = [text for text in TINY_RUN if not text.startswith("data.name")]
    config = ["digits", *overrides, "data.name=stripes", "data.root=photos", "train.max_steps=1"]
    small = ["train.batch_size=8", "data.image_size=16", "model.patch_size=4"]
    train = ["train", *config, *small, "--output", "run"]
    evaluate = ["evaluate", "run", "--data", "photos", "--output", "other"]
    # one process, because torch takes seconds to import
    script = f"""
import pathlib
import striped
from vit.cli.main import main
from vit.data.open import open_dataset
from vit.data.sources.registry import find_kind

striped.write_images(pathlib.Path("photos"))
print(find_kind("photos"))
print(open_dataset("stripes", root="photos").describe_files(), flush=True)
for command in ({train}, {evaluate}):
    try:
        main(command)
    except SystemExit as end:
        assert not end.code, command
"""
    done = run_python("-W", "ignore", "-c", script)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["stripes", "24 files: 24 images in 2 classes"]
    assert (tmp_path / "other" / "evaluation.json").is_file()


def test_it_is_named_in_errors_and_a_broken_one_in_a_warning(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    script = "from vit.data.open import open_dataset; open_dataset('strips')"
    outcome = run_python("-c", script)
    assert "unknown data.name 'strips'; known: cifar10" in outcome.stderr
    assert "stl10, stripes, svhn" in outcome.stderr
    assert "the entry point broken of vit.register_source" in outcome.stderr


def test_the_help_of_training_lists_it(
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    text = run_python("-m", "vit", "train", "--help").stdout
    section = text.partition("Data sets of other packages:")[2]
    assert ["stripes", "striped"] in [line.split() for line in section.splitlines()]


def test_a_source_registered_from_python_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_sources", dict(registry._sources))
    asked: list[Request] = []

    def find(request: Request) -> SourceSplits:
        asked.append(request)
        return registry.find_source("digits").find(request)

    source = vit.Source("scans", find, recognizes=lambda place: place.endswith(".scan"))
    vit.register_source(source)
    vit.register_source(source)  # again: the same one
    assert registry.find_kind("a/b.scan") == "scans"
    assert registry.find_kind("scans") is None
    assert len(registry.find_source("scans").find(asked_for("a/b.scan")).load("train")) == 1797
    assert asked[0].root == "a/b.scan"

    with pytest.raises(ValueError, match="there is a source 'digits' already; choose another name"):
        vit.register_source(vit.Source("digits", find))
    with pytest.raises(
        ValueError, match=r"source is a function|the function find, not a vit\.Source"
    ):
        vit.register_source(find)  # type: ignore[arg-type]


def asked_for(root: str) -> Request:
    return Request(root, None, Path("cache"))
