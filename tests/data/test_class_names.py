"""A text file gives classes their names, in the data set, in the model file and in whatever is made
of that."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY_RUN, Launcher
from vit.bundle import load_bundle
from vit.data.open import open_dataset, open_for_model

MakeFolder = Callable[..., Path]
WNIDS = ("n01440764", "n02102040")
WORDS = (
    "n00000001 something else\n"
    "n02102040\tEnglish springer, English springer spaniel\n"
    "n01440764 tench, Tinca tinca\n"
)


def write(folder: Path, text: str) -> Path:
    path = folder / "names.txt"
    path.write_text(text)
    return path


def make_wnids(make_folder: MakeFolder, count: int = 10) -> Path:
    return make_folder(*[f"{wnid}/{number}.png" for wnid in WNIDS for number in range(count)])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        (WORDS, ("tench", "English springer")),
        ("n01440764 fish, small\nn02102040 fish, red\n", ("fish (n01440764)", "fish (n02102040)")),
    ],
)
def test_lines_are_classes_and_their_names(
    make_folder: MakeFolder, tmp_path: Path, text: str, names: tuple[str, ...]
) -> None:
    root = make_wnids(make_folder)
    dataset = open_dataset("folder", root=root, class_names=write(tmp_path, text))
    assert dataset.split("train").class_names == dataset.split("test").class_names == names
    assert dataset.images.renamed_classes == dict(zip(WNIDS, names, strict=True))
    by_name = open_dataset(
        "folder",
        root=root,
        class_names=dataset.images.renamed_classes,
        classes=[names[1], WNIDS[0]],
    )
    assert by_name.split("all").class_names == names


def test_a_file_that_does_not_fit_is_one_line(
    make_folder: MakeFolder, cli: Launcher, tmp_path: Path
) -> None:
    names = write(tmp_path, "n01440764 tench\n")
    data = ["data.name=folder", f"data.root={make_wnids(make_folder)}", f"data.class_names={names}"]
    line = cli.fail("train", "digits", *TINY_RUN, *data, "-o", tmp_path / "run")
    assert f"data.class_names {names} has no line for 'n02102040'" in line
    names.unlink()
    assert str(names) in cli.fail("train", "digits", *TINY_RUN, *data, "-o", tmp_path / "run")


def test_the_model_file_keeps_them_for_all_that_follows(
    make_folder: MakeFolder, cli: Launcher, tmp_path: Path
) -> None:
    root, names = make_wnids(make_folder, 20), write(tmp_path, WORDS)
    data = [
        "data.name=folder",
        f"data.root={root}",
        f"data.class_names={names}",
        "train.batch_size=8",
    ]
    cli.succeed("train", "digits", *TINY_RUN, *data, "train.epochs=1", "-o", tmp_path / "run")
    names.unlink()
    bundle = load_bundle(tmp_path / "run")
    assert bundle.class_names == ("tench", "English springer")
    # of the same folder, and of another one whose folders are wnids
    other = make_folder(
        *[f"{wnid}/{number}.png" for wnid in WNIDS for number in range(2)], root="other"
    )
    for place in (None, other):
        source = open_for_model(place, recorded=bundle.recorded_images).split()
        assert source.class_names == bundle.class_names
    cli.succeed(
        "evaluate",
        tmp_path / "run",
        "--data",
        other,
        "--device",
        "cpu",
        "-o",
        tmp_path / "evaluation",
    )
    evaluation = json.loads((tmp_path / "evaluation" / "evaluation.json").read_text())
    assert [entry["name"] for entry in evaluation["per_class"]] == ["tench", "English springer"]
    page = (tmp_path / "evaluation" / "report.html").read_text()
    assert "English springer" in page
    assert "n02102040" not in page.replace(str(other), "").replace("n02102040/", "")
    assert "tench" in cli.succeed("predict", tmp_path / "run", other, "--device", "cpu").out
    cli.succeed(
        "explain",
        tmp_path / "run",
        "--num-images",
        "2",
        "--device",
        "cpu",
        "-o",
        tmp_path / "maps",
    )


def test_folders_of_wordnet_ids_show_words(make_folder: MakeFolder) -> None:
    # crane is a bird and a machine; of the last id timm's table knows nothing
    wnids = ("n02012849", "n03000684", "n03126707", "n99999999")
    root = make_folder(*[f"{wnid}/{number}.png" for wnid in wnids for number in range(3)])
    words = ("crane (n02012849)", "chain saw", "crane (n03126707)", "n99999999")

    splits = open_dataset("folder", root=root)
    assert splits.split("train").class_names == words
    # a model keeps them, so that a part of the classes is named alike
    assert splits.images.renamed_classes == dict(zip(wnids, words, strict=True))
    chosen = open_dataset("folder", root=root, classes=["n03126707", "chain saw"])
    assert chosen.split("train").class_names == ("chain saw", "crane")

    # names of the user's come first
    own = open_dataset("folder", root=root, class_names={wnids[1]: "saw"})
    assert own.split("train").class_names == (wnids[0], "saw", *wnids[2:])
