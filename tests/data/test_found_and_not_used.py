"""No layout loses images in silence: what isn't used is counted, and what may mean two things is
refused."""

import io
import json
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from tests.conftest import TINY_RUN, Launcher
from vit.data.images import read_image
from vit.data.open import open_dataset
from vit.evaluation.report.report import find_run

MakeFolder = Callable[..., Path]


def grid(*folders: str, count: int = 4) -> list[str]:
    return [f"{folder}/{number}.png" for folder in folders for number in range(count)]


def describe(root: Path, name: str = "folder") -> str:
    return open_dataset(name, root=root).describe_files()


def test_a_class_may_have_the_name_of_a_split(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("train", "car", "bus"))
    dataset = open_dataset("folder", root=root)
    assert dataset.split("all").class_names == ("bus", "car", "train")
    assert dataset.describe_files() == "12 files: 12 images in 3 classes"


@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        (("train/a", "train/b", "Train/a"), "holds Train/ and train/, both names of the train"),
        (("train/a", "train/b", "val/a", "validation/b"), "both names of the validation split"),
        (
            ("train/a", "train/b", "dev/a", "dev/b"),
            "holds train/ beside dev/: if train/ is a class",
        ),
        (("train", "test"), "train holds images in no folder of a class; move them into train/<"),
        (("nested/photos/a", "nested/photos/b"), r"did you mean .*nested/photos\?"),
        (("a", " a"), "'a' and ' a'|' a' and 'a' differ only in spaces"),
        (("caf\u00e9", "cafe\u0301"), "differ only in spaces or in how their characters"),
    ],
)
def test_folders_that_may_mean_two_things_are_refused(
    make_folder: MakeFolder, folders: tuple[str, ...], sentence: str
) -> None:
    with pytest.raises(ValueError, match=sentence):
        open_dataset("folder", root=make_folder(*grid(*folders)))


def test_every_file_is_counted(make_folder: MakeFolder) -> None:
    used = grid("train/a", "train/b", "val/a", "val/b")
    root = make_folder(*used, *grid("extra/a", "train"), "9.png")
    for name in ("train/a/1.heic", "train/b/2.heic", "README.txt", "val/a/.DS_Store"):
        (root / name).touch()
    assert describe(root) == (
        "29 files: 16 images in 2 classes, 4 not images: .heic 2, .txt 1, hidden 1 (pip install "
        "'.[heic]' in the clone of vit reads .heic), 9 not used: images in extra/ 4, "
        "images in train itself 4, images in images itself 1".replace(" itself", "/ itself")
    )


def test_links_to_other_classes_are_refused(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("a", "b"))
    (root / "c").symlink_to("a")
    with pytest.raises(ValueError, match="are the same folder, whose images would have two"):
        open_dataset("folder", root=root)
    (root / "c").unlink()
    link = root / "a" / "9.png"
    for target in ("../b/1.png", "../b"):
        link.symlink_to(target)
        with pytest.raises(ValueError, match=r"a/9\.png leads to .*/b.*; remove the link"):
            open_dataset("folder", root=root).split("train")
        link.unlink()


def test_a_table_says_what_it_leaves_out(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("a"), "b/0.png")
    (root / "a" / "notes.txt").touch()
    rows = "path,label\na/0.png,x\n./a/1.png,y\na/2.png,x\n"
    (root / "labels.csv").write_text(rows)
    assert describe(root) == (
        "5 files: 3 images in 2 classes, 1 not images: .txt 1, "
        "1 not used: images in no row of the table 1"
    )
    (root / "labels.csv").write_text(rows + "a/1.png,x\n")
    with pytest.raises(ValueError, match=r"line 5: a/1\.png was already listed"):
        open_dataset("folder", root=root)


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"path": "a/3.png", "label": "x"}, "line 4: no split; give every row a split, or none"),
        (
            {"path": "a/3.png", "label": "z", "split": "test"},
            "class 'z' has 1 images in the test split and none in the train split",
        ),
        ({"path": "a/3.png", "label": "x  y", "split": "train"}, "'x  y' and 'x y' differ only in"),
    ],
)
def test_the_last_row_is_read_as_the_others(
    make_folder: MakeFolder, changed: dict[str, str], sentence: str
) -> None:
    root = make_folder(*grid("a"))
    rows = [
        {"path": f"a/{n}.png", "label": ("x", "x y", "x")[n], "split": "train"} for n in range(3)
    ]
    text = "\ufeff" + "\n".join(map(json.dumps, [*rows, changed]))
    (root / "a.jsonl").write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=sentence):
        open_dataset("folder", root=root / "a.jsonl")


def test_json_lines_end_at_line_feeds_alone(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("a", count=2))
    rows = [{"path": f"a/{n}.png", "label": f"{n}\u2028"} for n in range(2)]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (root / "a.jsonl").write_text(f"\ufeff{text}\r\n", encoding="utf-8")
    assert len(open_dataset("folder", root=root / "a.jsonl").split("all")) == 2


@pytest.mark.parametrize("written", ["/{root}/out.png", "../out.png", "a/../../out.png"])
def test_a_row_outside_its_folder_is_refused(make_folder: MakeFolder, written: str) -> None:
    root = make_folder("a/0.png", "a/1.png", "../out.png")
    written = written.format(root=root.parent).replace("//", "/")
    (root / "labels.csv").write_text(f"path,label\na/0.png,x\n{root}/a/1.png,y\n{written},x\n")
    with pytest.raises(ValueError, match=r"line 4: .*out\.png is outside .*allow_outside=true"):
        open_dataset("folder", root=root)
    images = open_dataset("folder", root=root, allow_outside=True).split("all")
    assert list(images.ids) == ["a/0.png", "a/1.png", "../out.png"]
    images.image(2)


def write_tar(path: Path, *members: str) -> Path:
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for name in members:
            content = image.getvalue() if name.endswith(".png") else Path(name).stem[:1].encode()
            member = tarfile.TarInfo(name)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
    return path


SAMPLES = ("a0.png", "a0.cls", "b0.png", "b0.cls")


def test_shards_of_no_split_are_counted(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", *SAMPLES, "a0.json", "c.cls")
    write_tar(tmp_path / "valuable-0.tar", *SAMPLES)
    write_tar(tmp_path / "extra" / "0.tar", *SAMPLES)
    assert open_dataset("webdataset", root=tmp_path).source.origins.keys() == {"train"}
    assert describe(tmp_path, "webdataset") == (
        "6 files: 2 images in 2 classes, 1 not images: .json 1, 3 not used: "
        "labels without an image 1, shard extra/0.tar 1, shard valuable-0.tar 1"
    )


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        ((*SAMPLES, "a0.png"), "has two images or labels of the key a0"),
        ((*SAMPLES, "a0.cls"), "has two images or labels of the key a0"),
    ],
)
def test_a_key_twice_is_refused(tmp_path: Path, members: tuple[str, ...], sentence: str) -> None:
    write_tar(tmp_path / "0.tar", *members)
    with pytest.raises(ValueError, match=sentence):
        open_dataset("webdataset", root=tmp_path)


def test_shards_of_two_names_or_of_unknown_classes_are_refused(tmp_path: Path) -> None:
    write_tar(tmp_path / "train-0.tar", *SAMPLES)
    write_tar(tmp_path / "val-0.tar", *SAMPLES, "c0.png", "c0.cls")
    with pytest.raises(ValueError, match="class 'c' has 1 images in the validation split and none"):
        open_dataset("webdataset", root=tmp_path)
    write_tar(tmp_path / "validation" / "0.tar", *SAMPLES)
    write_tar(tmp_path / "val" / "0.tar", *SAMPLES)
    with pytest.raises(ValueError, match="holds shards named 'val/' and 'validation/' and 'val'"):
        open_dataset("webdataset", root=tmp_path)


def test_too_few_images_for_a_split_are_said(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("a", "b", count=2))
    (note,) = open_dataset("folder", root=root).split("train").notes
    assert note == "2 of 2 classes have too few images for 3 splits: a 2, b 2"
    with pytest.raises(ValueError, match="the validation split is empty: all classes have too few"):
        open_dataset("folder", root=root).split("validation")


def test_an_empty_file_and_heic_are_said(tmp_path: Path) -> None:
    (tmp_path / "empty.png").touch()
    with pytest.raises(ValueError, match=r"can't be read as an image: it is empty"):
        read_image(tmp_path / "empty.png")
    (tmp_path / "photo.jpg").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    with pytest.raises(
        ValueError, match=r"it is HEIC; pip install '\.\[heic\]' in the clone of vit"
    ):
        read_image(tmp_path / "photo.jpg")


def test_the_plan_has_the_total(make_folder: MakeFolder, cli: Launcher, tmp_path: Path) -> None:
    root = make_folder(*grid("a", "b", count=20))
    (root / "a" / "1.png").write_bytes(b"no image")
    (root / "b" / "1.txt").touch()
    data = ["data.name=folder", f"data.root={root}", "train.max_steps=1"]
    text = cli.succeed("train", "digits", *TINY_RUN, *data, "-o", tmp_path / "run").text
    total = "41 files: 39 images in 2 classes, 1 unreadable, 1 not images: .txt 1"
    assert total in " ".join(text.split())


def test_an_output_among_the_classes_is_refused_before_it_is_made(
    make_folder: MakeFolder, cli: Launcher
) -> None:
    root = make_folder(*grid("a", "b"))
    for arguments in ((root,), ("digits", "data.name=folder", f"data.root={root}")):
        message = cli.fail("train", *arguments, "--output", root / "run")
        assert "would be taken for a class; choose another --output" in message
    assert sorted(entry.name for entry in root.iterdir()) == ["a", "b"]


def test_folders_that_differ_in_case_alone_are_named(make_folder: MakeFolder) -> None:
    root = make_folder(*grid("Cat", "cat", "dog", "7", "07"))
    notes = open_dataset("folder", root=root).split("train").notes
    alike = [note for note in notes if "case or zeros alone" in note]
    assert [note.partition(": ")[2] for note in alike] == ["'07' and '7'", "'Cat' and 'cat'"]


def test_a_detection_file_is_named_as_that(tmp_path: Path, cli: Launcher) -> None:
    path = tmp_path / "instances.json"
    path.write_text('{"images": [], "categories": [], "annotations": []}')
    assert "instances.json is a detection file (COCO)" in cli.fail("train", path)
    path.write_text('{"train": {"epochs": 0}}')
    assert "detection" not in cli.fail("train", path)


def test_the_packaged_model_has_no_run_in_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "metrics.jsonl").write_text('{"epoch": 1}\n')
    assert find_run("imagenette") != Path()
    assert find_run("timm:vit_tiny_patch16_224") is None
    assert find_run("VisionTransformer") is None
