"""Tables, folders and published sets as people bring them: each is read with the right labels, or
refused by a sentence that says what to do."""

import itertools
import re
from collections import Counter
from pathlib import Path

import pytest
from PIL import Image

from vit.data.class_names import sort_class_names
from vit.data.dataset import ImageDataset, ImageRule
from vit.data.open import find_kind, open_dataset
from vit.data.splits import DatasetSplits
from vit.prediction.predict import list_inputs

ANIMALS = ("Dachs", "Füchse", "Luchs")
COUNT = 9
TRUTH = {f"images/{number:03d}.png": ANIMALS[number % 3] for number in range(COUNT)}


def save(path: Path, level: int = 0) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (4, 4), level).save(path)


def save_all(root: Path, *paths: str) -> Path:
    for number, path in enumerate(paths):
        save(root / path, number % 256)
    return root


def write(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def grid(*folders: str, count: int = 4) -> list[str]:
    return [f"{folder}/{number}.png" for folder in folders for number in range(count)]


def open_place(place: Path, **labels: str) -> DatasetSplits:
    kind = find_kind(place)
    assert kind is not None, place
    return open_dataset(kind, root=place, rule=ImageRule(**labels))


def read(place: Path, split: str = "all", **labels: str) -> dict[str, str]:
    """Path → class of the images of a split."""
    dataset = open_place(place, **labels).split(split)
    names = [dataset.class_names[label] for label in dataset.labels]
    return dict(zip(dataset.ids, names, strict=True))


def list_notes(place: Path, **labels: str) -> str:
    splits = open_place(place, **labels)
    return "\n".join([*splits.read, *splits.split("all").notes])


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_all(tmp_path_factory.mktemp("tables") / "photos", *TRUTH)


# ---- tables of named programs. Fields of a row: p path, b path of Windows, f name of the file, s its
# stem, l class, g a group, n the row's number

PROGRAMS: dict[str, tuple[str, str, dict[str, str]]] = {
    "Excel, German": ("Datei;Gewicht;Art", "{b};12,5;{l}", {"encoding": "cp1252"}),
    "Excel, Unicode text": ("Datei\tKlasse", "{p}\t{l}", {"encoding": "utf-16", "suffix": ".txt"}),
    "R, write.csv": ('"","path","label"', '"{n}","{p}","{l}"', {}),
    "pandas, index": (",path,label", "{n},{p},{l}", {}),
    "SPSS": ("Bild;Label;Alter", "{p};{l};{n},00", {"encoding": "utf-8-sig", "end": "\r\n"}),
    "Stata": ("path,species,species_code", "{p},{l},{n}", {}),
    "SQLite, list": ("id|path|label", "{n}|{p}|{l}", {}),
    "decimal commas": ("path;label;x;y", "{p};{l};0,5;1,5", {}),
    "Markdown": ("| path | label |\n|---|---|", "| {p} | {l} |", {"suffix": ".txt"}),
    "Camelot": ("Absolute Path,Site Name,Species", "{p},S{g},{l}", {}),
    "Timelapse": ("File,RelativePath,DateTime,Species,Count", "{f},images,2026-01-01,{l},1", {}),
    "HAM10000": ("lesion_id,image_id,dx,sex", "L{g},{s},{l},male", {}),
    "fastai": ("name,label", "{f},{l}", {}),
    "absolute paths of Windows": ("path,label", "D:\\data\\photos\\images\\{f},{l}", {}),
    "newlines in quotes": ("path,comment,label", '{p},"two\nlines",{l}', {}),
    "UTF-32": ("path,label", "{p},{l}", {"encoding": "utf-32"}),
    "comments above": ("# by me\n# 2026\npath,label", "{p},{l}", {}),
    "old Macs": ("path,label", "{p},{l}", {"encoding": "mac_roman"}),
    "Zooniverse": ("image,annotations", '{f},"[{{""value"":""{l}""}}]"', {}),
}


def fill(
    header: str, row: str, encoding: str = "utf-8", end: str = "\n", suffix: str = ""
) -> bytes:
    """Return a table with all images."""
    lines = [header] if header else []
    for number, (path, label) in enumerate(TRUTH.items(), start=1):
        lines.append(
            row.format(
                p=path, b=path.replace("/", "\\"), f=Path(path).name, s=Path(path).stem, l=label,
                g=number % 4, n=number,
            )
        )  # fmt: skip
    return (end.join(lines) + end).encode(encoding)


def test_zero_bytes_are_in_no_label(tmp_path: Path) -> None:
    save_all(tmp_path, "a/0.png", "b/0.png")
    table = write(tmp_path / "t.csv", "path,label\na/0.png,a\nb/0.png,a\0\n")
    with pytest.raises(ValueError, match="holds zero bytes, no text; save it as CSV"):
        read(table)


# ---- whatever a table looks like, no image gets the label of another one


def read_or_refuse(table: Path, **labels: str) -> str:
    """ "read" if all labels are right, "refused" for a sentence. Wrong labels fail."""
    try:
        found = read(table, **labels)
    except ValueError as error:
        is_named = table.name in str(error) or str(table.parent) in str(error)
        return "refused" if is_named and "\n" not in str(error) else f"unclear: {error}"
    if found != TRUTH:
        # in an unknown encoding a name may be spelled otherwise, which the plan says; and a column
        # that the user names is taken as it is written
        assert labels or "was read as Windows-1252" in list_notes(table), table.read_bytes()[:100]
        assert len(set(zip(found.values(), TRUTH.values(), strict=True))) == len(ANIMALS)
        assert list(found) == list(TRUTH)
    return "read"


def name_columns(header: str, row: str) -> dict[str, str]:
    """The columns that hold the images and the classes, by the fields of `fill`."""
    delimiter = max(",;\t|", key=header.count)
    pairs = list(zip(header.split(delimiter), row.split(delimiter), strict=False))
    paths = [
        name for name, field in pairs if any(each in field for each in ("{p}", "{b}", "{f}", "{s}"))
    ]
    classes = [name for name, field in pairs if "{l}" in field]
    return {"path_column": (paths or [""])[0], "label_column": (classes or [""])[0]}


def test_no_table_of_a_program_gives_an_image_a_wrong_label(photos: Path) -> None:
    outcomes: Counter[str] = Counter()
    for header, row, options in PROGRAMS.values():
        table = photos / f"t{options.get('suffix', '.csv')}"
        table.write_bytes(fill(header, row, **options))
        outcome = read_or_refuse(table)
        if outcome == "refused":
            outcome = read_or_refuse(table, **name_columns(header, row))
            outcome += " with options" * (outcome == "read")
        outcomes[outcome] += 1
        table.unlink()
    print(outcomes)
    assert set(outcomes) <= {"read", "read with options", "refused"}
    assert outcomes["read"] >= 8
    assert outcomes["read with options"] >= 7


@pytest.mark.parametrize("program", ["labels.csv", "metadata.csv"])
def test_a_table_in_the_folder_names_the_classes(tmp_path: Path, program: str) -> None:
    save_all(tmp_path, *grid("a"))
    write(
        tmp_path / program,
        "file_name,label,site\n" + "".join(f"{n}.png,{n % 2},x\n" for n in range(4)),
    )
    splits = open_place(tmp_path)
    assert read(tmp_path) == {f"a/{n}.png": str(n % 2) for n in range(4)}
    assert "images in 'file_name', classes in 'label'; columns not read: site" in " ".join(
        splits.read
    )
    assert splits.split("all").read_column("site") == {f"a/{n}.png": "x" for n in range(4)}


def test_columns_are_named_by_the_user(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("a", count=8))
    rows = "".join(
        f"{n},{'ab'[n % 2]},{'train' if n < 6 else 'test'},g{n // 2}\n" for n in range(8)
    )
    table = write(tmp_path / "t.csv", f"image id,breed,fold,patient\n{rows}")
    with pytest.raises(
        ValueError, match=r"its columns are 'image id', 'breed', 'fold', 'patient'.*--path-column"
    ):
        read(table)
    named = {
        "path_column": "image id",
        "label_column": "breed",
        "split_column": "fold",
        "group_column": "patient",
    }
    assert list(read(table, "test", **named)) == ["a/6.png", "a/7.png"]
    assert set(open_place(table, **named).split("all").groups) == {"g0", "g1", "g2", "g3"}
    with pytest.raises(ValueError, match="has no column x"):
        read(table, **{**named, "path_column": "x"})


def test_every_wrong_row_is_named_by_its_line_ten_at_most(tmp_path: Path) -> None:
    save_all(tmp_path, "0.png", "1.png")
    rows = "0.png,a\n1.png,\n0.png,b\n" + "".join(f"gone{n}.png,a\n" for n in range(20))
    table = write(tmp_path / "t.csv", f"path,label\n{rows}")
    with pytest.raises(
        ValueError,
        match=r"line 3: it has no class; .*line 4: 0.png has another class .*in line 2; line 5: gone0",
    ) as caught:
        read(table)
    assert "12 rows more" in str(caught.value)
    assert len(re.findall(r"line \d+: ", str(caught.value))) == 10


def name_labels(dataset: ImageDataset) -> list[str]:
    """The names of each image's labels."""
    return [
        ", ".join(itertools.compress(dataset.class_names, row)) or "no label"
        for row in dataset.labels.tolist()
    ]


@pytest.mark.parametrize(
    ("text", "labels"),
    [
        ("path,label\n0.png,a|b\n1.png,b\n2.png,\n", ["a, b", "b", "no label"]),
        ("path,a,b\n0.png,1,1\n1.png,0,1\n2.png,0,0\n", ["a, b", "b", "no label"]),
    ],
)
def test_several_labels_are_read_where_the_user_says_so(
    tmp_path: Path, text: str, labels: list[str]
) -> None:
    save_all(tmp_path, "0.png", "1.png", "2.png")
    table = write(tmp_path / "t.csv", text)
    rule = ImageRule(task="multilabel", label_column="a,b" if ",a,b" in text else None)
    dataset = open_dataset("folder", root=table, rule=rule).split("all")
    assert name_labels(dataset) == labels
    if ",a,b" in text:
        # without a word there is one class an image
        with pytest.raises(ValueError, match=r"line 2: it has a and b; keep one class, or set"):
            read(table, label_column="a,b")
    if "a|b" in text:
        # without a word they are names of classes
        write(table, text.replace("2.png,\n", ""))
        assert set(read(table).values()) == {"a|b", "b"}


@pytest.mark.parametrize(
    ("files", "sentence"),
    [
        (["train/a/0.png", "train/b/0.png", "c/0.png", "c/0.txt"], "splits, beside c;"),
        (
            ["train/a/0.png", "train/b/0.png", "val/0.png"],
            "val holds images in no folder of a class; move",
        ),
        (["a/0.png"], "fewer than two classes: 'a'"),
        (["0.png", "1.png"], "find the class in their names with --label-by"),
        (["a/0.png", "b/0.txt"], "b holds no images; files not used: 1 (.txt); remove it"),
        (
            ["train/a/0.png", "train/b/0.png", "test/c/0.png"],
            "class 'c' has 1 images in the test split and none",
        ),
    ],
)
def test_folders_that_are_no_classes_are_refused_in_a_sentence(
    tmp_path: Path, files: list[str], sentence: str
) -> None:
    save_all(tmp_path, *(file for file in files if file.endswith(".png")))
    for file in files:
        if file.endswith(".txt"):
            write(tmp_path / file, "x")
    with pytest.raises(ValueError, match=re.escape(sentence)):
        read(tmp_path)


def test_what_is_not_read_of_a_folder_is_said(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("train/a", "train/b"), "test/0.png", "stray.png")
    write(tmp_path / "train/a/notes.txt", "x")
    notes = list_notes(tmp_path)
    assert "they are not used, and test images are taken from the others" in notes
    assert "files not used: 3 (.png, .txt)" in notes
    assert len(read(tmp_path)) == 8


def test_ids_that_name_two_files_are_refused(tmp_path: Path) -> None:
    save_all(tmp_path, "a/1.png", "b/1.png", "c/2.png", "c/2.jpg", "d/3.png", "d/4.png")
    table = write(tmp_path / "list.csv", "path,label\n1,x\n2,x\n3,y\n4,y\n")
    with pytest.raises(
        ValueError, match=r"line 2: 1 may be a/1.png or b/1.png; .*line 3: 2 may be"
    ):
        read(table)


def test_label_by_says_what_it_leaves_out(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("train/cat", "train/dog"), "notes/9.png")
    labels = read(tmp_path, label_by="(cat|dog)")
    assert set(labels) == set(grid("train/cat", "train/dog"))
    notes = list_notes(tmp_path, label_by="(cat|dog)")
    assert "1 images have no class by data.label_by and are not used, such as notes/9.png" in notes
    for wrong, sentence in (("(", "not a regular"), ("cat", "has 0 groups"), ("(x)", "no class")):
        with pytest.raises(ValueError, match=sentence):
            read(tmp_path, label_by=wrong)
    with pytest.raises(ValueError, match="for folders and tables, not for data"):
        open_dataset("digits", rule=ImageRule(label_by="(x)"))


def test_folders_of_systems_are_left_out(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("cat", "dog"))
    hidden = ("@eaDir/cat", "cat/@eaDir", "dog/.thumbnails", "__MACOSX", "#recycle", ".ipynb_ch")
    hidden += ("cat/Thumbnails",)
    save_all(tmp_path, *grid(*hidden, count=3))
    save(tmp_path / "cat/.hidden.png")
    write(tmp_path / "dog/notes.txt", "woof")
    assert read(tmp_path) == dict.fromkeys(grid("cat"), "cat") | dict.fromkeys(grid("dog"), "dog")
    # neither are they predicted
    listed = [str(Path(name).relative_to(tmp_path)) for name, _ in list_inputs(tmp_path)]
    assert listed == sorted(grid("cat", "dog"))
    assert "files not used: 2 (.png, .txt)" in list_notes(tmp_path)


def test_a_split_of_fewer_classes_is_matched_by_name(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("train/a", "train/b", "train/c", "val/b", "val/c"))
    assert set(read(tmp_path, "test").values()) == {"b", "c"}
    assert read(tmp_path, "test")["val/b/0.png"] == "b"
    save_all(tmp_path, *grid("val/C"))
    with pytest.raises(
        ValueError, match=r"class 'C' has 4 images in the validation split and none"
    ):
        read(tmp_path)


def test_whole_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    assert sort_class_names(["10", "9", "cat", "-1", "007"]) == ("-1", "007", "9", "10", "cat")
    numbers = tuple(map(str, range(12)))
    save_all(tmp_path, *grid(*(f"photos/{number}" for number in numbers)))
    assert open_place(tmp_path / "photos").split("train").class_names == numbers
    rows = [f"photos/{n}/0.png,{n}" for n in range(12)]
    table = write(tmp_path / "t.csv", "\n".join(["path,label", *rows]))
    assert open_place(table).split("all").class_names == numbers
