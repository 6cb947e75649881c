"""A package from outside adds a map method without a changed line here."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import vit
from tests.explanation.model_zoo import build
from vit.bundle import Bundle
from vit.data.preprocess import Preprocess
from vit.explanation.capture import layers
from vit.explanation.methods.registry import METHODS, list_methods

PLUGINS = Path(__file__).parents[2] / "plugins"
PHOTO = Path(__file__).parents[3] / "docs" / "photos" / "church.jpg"
# the help and the list before anything is explained, in one process: torch takes seconds to import
SCRIPT = """
import sys
from vit.cli.main import main
from vit.explanation.methods.registry import list_methods

for command in (["explain", "--help"], sys.argv[1:]):
    try:
        main(command)
    except SystemExit as end:
        assert not end.code, command
    print("methods:", *list_methods())
"""


def run(folder: Path, *arguments: str) -> str:
    """The output of Python in a fresh process that has the package installed."""
    path = os.pathsep.join([str(PLUGINS), str(PLUGINS.parents[1])])
    done = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": path, "CUDA_VISIBLE_DEVICES": ""},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_method_of_another_package_is_in_the_command_its_help_and_the_lists(
    tmp_path: Path,
) -> None:
    command = ["explain", "imagenette", str(PHOTO), "--output", "maps"]
    options = ["--method", "value-norms", "--no-checks"]
    _, methods, _ = run(tmp_path, "-c", SCRIPT, *command, *options).split("methods:")
    assert "value-norms" in methods.split()
    manifest = json.loads((tmp_path / "maps" / "manifest.json").read_text())
    (found,) = manifest["images"][0]["maps"]
    assert found["caption"].startswith("norms of values (the same for every class)")


def test_a_registered_method_is_explained_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(METHODS, "_methods", dict(METHODS._methods))
    method = vit.Method(
        name="ramp",
        title="ramp",
        compute=lambda forward, classes: torch.arange(25.0).expand(len(classes), -1),
    )
    vit.register_method(method)
    vit.register_method(method)
    assert "ramp" in list_methods()
    model, _ = build("ours")
    bundle = Bundle.from_model(model, class_names=list("abcde"), preprocess=Preprocess((32, 48)))
    photo = np.zeros((32, 48, 3), dtype=np.uint8)
    (ramp,) = vit.explain(bundle, photo, methods="ramp", checks=False).maps["ramp"]
    assert torch.equal(ramp.flatten(), torch.arange(1.0, 25.0))
    with pytest.raises(ValueError, match="called 'ramp' already"):
        vit.register_method(vit.Method(name="ramp", title="another", compute="nothing:nothing"))


def test_attention_layers_are_searched_once_for_an_explained_photo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A family of layers that matches nothing is asked about each module once."""
    asked = []

    class Asked(layers.AttentionLayer):
        @classmethod
        def matches(cls, module: torch.nn.Module, block: torch.nn.Module) -> bool:
            asked.append((module, block))
            return False

    monkeypatch.setattr(layers, "LAYER_KINDS", (Asked, *layers.LAYER_KINDS))
    bundle = vit.load_bundle("imagenette")
    explanations = vit.explain(bundle, PHOTO)
    assert set(explanations.maps) == {"rollout", "libra-removal"}
    assert len(explanations.checks["rollout"][0]) == 1
    assert asked
    assert len(asked) == len(set(asked))
