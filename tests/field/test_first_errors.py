"""An error of the arguments names the remedy in the user's words."""

import zipfile
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import Launcher, save_noise

# command → what its error says
COMMANDS = [
    (["train", "Meine Foto"], "did you mean 'Meine Fotos (Klasse 9b)'?"),
    (["train", "klasse.zip"], "klasse.zip is an archive; unpack it and name the folder"),
    (
        ["train", "gepackt"],
        "holds no images in folders of classes; move them into a folder for each class",
    ),
    (
        ["train", "arbeit.pdf"],
        "arbeit.pdf is no configuration (.yaml), table (.csv) or folder of images",
    ),
    (["train", "liste.xlsx"], "liste.xlsx is a spreadsheet; save the table as CSV"),
    (
        ["train", "bilder.h5"],
        "bilder.h5 is no configuration (.yaml), table (.csv) or folder of images",
    ),
    (
        ["train", "zebra.jpg"],
        "zebra.jpg is no configuration (.yaml), table (.csv) or folder of images",
    ),
    (["train", "aussen"], "name the folder that holds the folders of classes"),
    (["train", "eine"], "fewer than two classes: 'Fisch'"),
    (
        ["train", "Meine Fotos (Klasse 9b)"],
        "or all classes have too few",
    ),
    (
        ["train", "kaputt"],
        "none of 10 images of folder train can be read; check the files, such as",
    ),
    (["train", "cifar10/cpuu"], "did you mean cifar10/cpu?"),
    (["train", "digits", "train.epoch=3"], "did you mean train.epochs?"),
    (["train", "digits", "--init", "lauf"], "did you mean laeufe?"),
    (["train", "digits", "--resume", "--overwrite"], "give one of them"),
    (["train", "digits", "train.device=cuda:7"], "cuda:7"),
    (["audit", "Meine Foto", "--model", "imagenette"], "did you mean 'Meine Fotos (Klasse 9b)'?"),
    (["audit", "klasse.zip", "--model", "imagenette"], "klasse.zip is an archive; unpack it"),
    (["evaluate", "imagenete"], "did you mean imagenette?"),
    (["evaluate", "laeufe"], "laeufe holds no model.safetensors"),
    (["evaluate", "imagenette", "--data", "gepackt"], "unpack their archive"),
    (["evaluate", "imagenette", "--data", "cifar11"], "did you mean cifar10?"),
    (["explain", "imagenette", "zebra.jgp"], "did you mean zebra.jpg?"),
    (["explain", "imagenette", "arbeit.pdf"], "arbeit.pdf can't be read as an image"),
    (["predict", "zebra.jpg", "imagenette"], "zebra.jpg is an image, not a model"),
    (["predict", "imagenette", "klasse.zip"], "klasse.zip is an archive; unpack it"),
    (["predict", "imagenette", "zebra.jgp"], "did you mean zebra.jpg?"),
    (
        ["predict", "imagenette", "gepackt"],
        "gepackt holds no images; check the path, and unpack archives in it",
    ),
    (["predict", "imagenette", "s3://photos/zebra.jpg"], "is an address; copy its files"),
    (["compare", "laeufe", "lauf"], "laeufe has no evaluation.json"),
    (["faithfulness", "klasse.zip"], "klasse.zip is an archive"),
    (["export", "imagenete"], "did you mean imagenette?"),
    (["serve", "imagenete"], "did you mean imagenette?"),
    (["info", "imagenete"], "did you mean imagenette?"),
]


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the commands name."""
    folder = tmp_path_factory.mktemp("desk")
    picture = Image.new("RGB", (8, 8))
    for name in ("Meine Fotos (Klasse 9b)/Fisch", "aussen/innen/Fisch", "eine/Fisch", "Masken"):
        (folder / name).mkdir(parents=True)
        picture.save(folder / name / "1.png")
    for name in ("Meine Fotos (Klasse 9b)/Hund", "aussen/innen/Hund"):
        (folder / name).mkdir()
        picture.save(folder / name / "1.png")
    for number in range(16):
        path = folder / "kaputt" / ("Fisch", "Hund")[number % 2] / f"{number:02d}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (folder / "laeufe").mkdir()
    (folder / "gepackt").mkdir()
    for place in (folder, folder / "gepackt"):
        with zipfile.ZipFile(place / "klasse.zip", "w") as archive:
            archive.writestr("Fisch/1.png", b"")
    (folder / "arbeit.pdf").write_bytes(b"%PDF-1.7")
    (folder / "liste.xlsx").write_bytes(b"PK")
    (folder / "bilder.h5").write_bytes(b"\x89HDF\r\n")
    picture.save(folder / "zebra.jpg")
    return folder


@pytest.mark.parametrize(("arguments", "expected"), COMMANDS)
def test_errors_of_arguments_name_the_remedy(
    cli: Launcher,
    desk: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: list[str],
    expected: str,
) -> None:
    monkeypatch.chdir(desk)
    output = [] if arguments[0] in ("predict", "compare", "serve", "info") else ["-o", "out"]
    assert expected in cli.fail(*arguments, *output)
    assert not (desk / "out").exists()


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    """Two classes of 20 images; 12 of the 40 are damaged."""
    names = [f"{name}/{number:02}.png" for number in range(20) for name in ("cat", "dog")]
    for path in save_noise(tmp_path / "photos", names, size=(9, 9))[:12]:
        path.write_bytes(path.read_bytes()[:60])
    return tmp_path / "photos"


def test_ten_unreadable_files_are_named_and_nothing_is_left(
    cli: Launcher, broken: Path, tmp_path: Path
) -> None:
    line = cli.fail("train", broken, "--output", tmp_path / "run")
    assert "images can't be read, more than the allowed fraction of 0.05" in line
    assert (
        sum(f"{name}/{number:02}.png" in line for name in ("cat", "dog") for number in range(6))
        >= 7
    )
    for name in ("cat", "dog"):
        (tmp_path / "packed" / name).mkdir(parents=True)
        (tmp_path / "packed" / name / "photos.zip").touch()
    line = cli.fail("train", tmp_path / "packed", "--output", tmp_path / "run")
    assert "cat holds no images; files not used: 1 (.zip); remove it" in line
    assert not (tmp_path / "run").exists()
