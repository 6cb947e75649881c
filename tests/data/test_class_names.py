"""Classes have names in words, in the data set, in the model file and in whatever is made of that."""

import json
from collections.abc import Callable
from pathlib import Path

from tests.conftest import TINY_RUN, Launcher
from vit.bundle import load_bundle
from vit.data.dataset import ImageRule
from vit.data.open import open_dataset, open_for_model

MakeFolder = Callable[..., Path]
WNIDS = ("n01440764", "n02102040")


def test_the_model_file_keeps_names_for_all_that_follows(
    make_folder: MakeFolder, cli: Launcher, tmp_path: Path
) -> None:
    root = make_folder(*[f"{wnid}/{number}.png" for wnid in WNIDS for number in range(20)])
    words = '{"n01440764": "fish", "n02102040": "springer"}'
    data = ["data.name=folder", f"data.root={root}", f"data.class_names={words}"]
    run = tmp_path / "run"
    short = ["train.batch_size=8", "train.epochs=1"]
    cli.succeed("train", "digits", *TINY_RUN, *data, *short, "-o", run)
    bundle = load_bundle(run)
    assert bundle.class_names == ("fish", "springer")
    # of the same folder, and of another one whose folders are wnids
    names = [f"{wnid}/{number}.png" for wnid in WNIDS for number in range(2)]
    other = make_folder(*names, root="other")
    for place in (None, other):
        source = open_for_model(place, recorded=bundle.recorded_images).split()
        assert source.class_names == bundle.class_names
    output = tmp_path / "evaluation"
    options = ["--device", "cpu", "--num-examples", 0]
    cli.succeed("evaluate", run, "--data", other, *options, "-o", output)
    evaluation = json.loads((output / "evaluation.json").read_text())
    assert [entry["name"] for entry in evaluation["per_class"]] == ["fish", "springer"]
    page = (output / "report.html").read_text()
    assert "springer" in page
    assert "n02102040" not in page.replace(str(other), "").replace("n02102040/", "")


def test_folders_of_wordnet_ids_show_words(make_folder: MakeFolder) -> None:
    # crane is a bird and a machine; of the last id timm's table knows nothing
    wnids = ("n02012849", "n03000684", "n03126707", "n99999999")
    root = make_folder(*[f"{wnid}/{number}.png" for wnid in wnids for number in range(3)])
    words = ("crane (n02012849)", "chain saw", "crane (n03126707)", "n99999999")

    splits = open_dataset("folder", root=root)
    assert splits.split("train").class_names == words
    # a model keeps them, so that a part of the classes is named alike
    assert splits.renamed_classes == dict(zip(wnids, words, strict=True))
    chosen = open_dataset("folder", root=root, rule=ImageRule(classes=["n03126707", "chain saw"]))
    assert chosen.split("train").class_names == ("chain saw", "crane")

    # names of the user's come first
    rule = ImageRule(class_names={wnids[1]: "saw"}, classes=["saw", words[0]])
    own = open_dataset("folder", root=root, rule=rule)
    assert own.split("train").class_names == (wnids[0], "saw")
