"""The model that comes with the package: found by its name, small, and as its card says."""

from pathlib import Path

import pytest

import vit
from tests.conftest import Launcher
from vit.bundle import load_bundle
from vit.model.find_file import PACKAGED_FILE as FILE

PHOTOS = Path(__file__).parent.parent / "docs" / "photos"


def test_the_packaged_model_is_small_and_without_paths_of_the_machine_that_trained_it() -> None:
    assert FILE.stat().st_size <= 6_000_000
    metadata = load_bundle("imagenette").metadata
    assert metadata["config"]["data"]["root"] is None
    assert b"/work/" not in FILE.read_bytes()
    assert b"/tmp/" not in FILE.read_bytes()


def test_the_example_photos_get_their_classes_and_the_crocodile_is_unusual(tmp_path: Path) -> None:
    predictions = vit.predict("imagenette", PHOTOS, top_k=10).predictions
    for prediction in predictions:
        assert sum(probability for *_, probability in prediction.classes) == pytest.approx(1)
    found = {Path(each.path).stem: (each.classes[0][1].lower(), each.note) for each in predictions}
    # a new model for which it isn't needs another photo of a class that it doesn't know
    assert found.pop("marsh_crocodile")[1] == "unusual"
    assert found == {name: (name.replace("_", " "), "") for name in found}
    assert sorted(found) == ["chain_saw", "church", "french_horn"]

    explanations = vit.explain("imagenette", PHOTOS, output=tmp_path / "maps")
    assert explanations.maps["rollout"].shape[0] == 4
    assert (tmp_path / "maps" / "index.png").is_file()


def test_a_folder_of_images_of_that_name_does_not_hide_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "imagenette" / "train").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert load_bundle("imagenette").class_names[3] == "chain saw"


def test_info_tells_accuracy_interval_and_limits(cli: Launcher) -> None:
    outcome = cli.run("info", "imagenette")
    evaluation = load_bundle("imagenette").metadata["evaluation"]
    assert outcome.code == 0
    text = " ".join(outcome.out.split())
    for name in ("top1", "top1_low", "top1_high", "num_images", "images"):
        assert f"{name}: {evaluation[name]}" in text
    assert "whatever a photo shows" in text


def test_the_card_has_the_figures_of_the_file() -> None:
    evaluation = load_bundle("imagenette").metadata["evaluation"]
    card = FILE.with_suffix(".md").read_text()
    low = evaluation["top1_low"]
    high = evaluation["top1_high"]
    assert f"{evaluation['top1']:.1%} ({low:.1%}–{high:.1%}" in card
    assert low < evaluation["top1"] < high
