"""Tables, folders and published sets as people bring them: each is read with the right labels, or
refused by a sentence that says what to do."""

import csv
import gzip
import io
import itertools
import json
import re
import shutil
import struct
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import vit
from tests.conftest import TINY_RUN, SaveModel
from vit.data.class_names import sort_class_names
from vit.data.dataset import LabelRule
from vit.data.images import read_image
from vit.data.open import RecordedImages, open_dataset, open_for_model
from vit.data.sources.python_objects import find_python_objects
from vit.data.sources.registry import find_kind
from vit.data.splits import DatasetSplits, SplitRule
from vit.explanation.targets import _find_class

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
    return open_dataset(kind, root=place, labels=LabelRule(**labels))


def read(place: Path, split: str = "all", **labels: str) -> dict[str, str]:
    """Path → class of the images of a split."""
    dataset = open_place(place, **labels).split(split)
    names = [dataset.class_names[label] for label in dataset.labels]
    return dict(zip(dataset.ids, names, strict=True))


def list_notes(place: Path, **labels: str) -> str:
    splits = open_place(place, **labels)
    return "\n".join([*splits.source.guesses, *splits.split("all").notes])


# ---- 60 tables as other programs write them


class Style:
    """How a program writes a table."""

    def __init__(
        self,
        name: str,
        *,
        header: str = "path,label",
        delimiter: str = ",",
        encoding: str = "utf-8",
        end: str = "\n",
        quote: Callable[[str], str] = str,
        path: Callable[[str], str] = str,
        row: str = "{path},{label}",
        before: str = "",
        after: str = "",
        suffix: str = ".csv",
    ) -> None:
        self.name = name
        self.suffix = suffix
        lines = [before] if before else []
        columns = [row.format(path="\0", label="\1", number="\2")] if header else []
        fields = header.split(",") if header else []
        lines += [delimiter.join(map(quote, fields))] if columns else []
        for number, (image, label) in enumerate(TRUTH.items(), start=1):
            values = row.split(",")
            values = [
                value.format(path=path(image), label=label, number=number) for value in values
            ]
            lines.append(delimiter.join(map(quote, values)))
        self.content = (end.join(lines) + end + after).encode(encoding)


def list_styles() -> Iterator[Style]:
    # Excel, LibreOffice, R and pandas in the countries of Europe
    delimiters = {"comma": ",", "semicolon": ";", "tab": "\t", "bar": "|"}
    encodings = ("utf-8", "utf-8-sig", "utf-16", "cp1252")
    ends = {"unix": "\n", "windows": "\r\n", "old mac": "\r"}
    for (mark, delimiter), encoding in itertools.product(delimiters.items(), encodings):
        end = list(ends.values())[(len(mark) + len(encoding)) % 3]
        yield Style(f"{mark} {encoding}", delimiter=delimiter, encoding=encoding, end=end)
    yield Style("UTF-16 without a mark", encoding="utf-16-le", delimiter="\t", end="\r\n")
    yield Style("UTF-16 of the other order", encoding="utf-16-be", delimiter=";")

    headers = (
        "Path,Label",
        "FILENAME,CLASS",
        "file_name,category",
        "Image Path,Species",
        "img,lbl",
        "image,target",
        "filepath,class_name",
        "ImageID,Diagnosis",
        "image_id,breed",
        "Dateiname,Art",
        "fichier,espèce",
    )
    for header in headers:
        yield Style(f"header {header}", header=header)
        yield Style(f"semicolons {header}", header=header, delimiter=";", encoding="cp1252")

    paths: dict[str, Callable[[str], str]] = {
        "backslashes": lambda path: path.replace("/", "\\"),
        "a dot": lambda path: f"./{path}",
        "no suffix": lambda path: path.removesuffix(".png"),
        "the name alone": lambda path: path.removeprefix("images/"),
        "an id": lambda path: Path(path).stem,
        "large letters": str.upper,
        "spaces": lambda path: f"  {path} ",
        "Windows": lambda path: "C:\\Users\\me\\photos\\" + path.replace("/", "\\"),
        "another computer": lambda path: f"/home/me/photos/{path}",
        "a slash before it": lambda path: f"/{path}",
        "web spaces": lambda path: path.replace("images", "%69mages"),
        "the folder's own name": lambda path: f"photos/{path}",
    }
    for name, path in paths.items():
        yield Style(f"path with {name}", path=path)

    yield Style("all quoted", quote='"{}"'.format)
    yield Style("single quotes", quote="'{}'".format)
    yield Style("pandas with an index", header=",path,label", row="{number},{path},{label}")
    yield Style("R with row names", header="path,label", row="{number},{path},{label}")
    yield Style("delimiter at the end", header="path,label,", row="{path},{label},")
    yield Style("Excel's sep=", before="sep=;", delimiter=";")
    yield Style("a title above", before="Fotofallen 2026\n")
    yield Style("blank lines", after="\n\n,,\n\n")
    yield Style("text file of tabs", delimiter="\t", suffix=".txt", encoding="utf-16")
    yield Style("no header", header="")
    yield Style("no header and no suffix", header="", path=lambda path: Path(path).stem)
    yield Style("spaces around labels", row="{path}, {label} ")
    yield Style(
        "id and words", header="path,class_id,class", row="{path},{label}7,{label}", delimiter="\t"
    )


STYLES = list(list_styles())


def test_there_are_sixty_tables() -> None:
    assert len({style.name for style in STYLES}) == len(STYLES) >= 60


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_all(tmp_path_factory.mktemp("tables") / "photos", *TRUTH)


@pytest.mark.parametrize("style", STYLES, ids=lambda style: style.name)
def test_a_table_of_another_program_is_read(style: Style, photos: Path) -> None:
    table = photos / f"table{style.suffix}"
    table.write_bytes(style.content)
    try:
        assert read(table) == TRUTH
    finally:
        table.unlink()


# ---- tables of named programs. Fields of a row: p path, b path of Windows, f name of the file, s its
# stem, l class, c its number, g a group, n the row's number

INDIVIDUAL: dict[str, tuple[str, str, dict[str, str]]] = {
    "Excel, German": ("Datei;Gewicht;Art", "{b};12,5;{l}", {"encoding": "cp1252"}),
    "Excel, French": ("Fichier;Espèce;n", "{p};{l};1", {"encoding": "cp1252"}),
    "Excel, Spanish": ("archivo;clase;n", "{p};{l};1", {"encoding": "utf-8-sig"}),
    "Excel, Unicode text": ("Datei\tKlasse", "{p}\t{l}", {"encoding": "utf-16", "suffix": ".txt"}),
    "Excel for old Macs": ("path;label", "{p};{l}", {"encoding": "cp1252", "end": "\r"}),
    "LibreOffice, single quotes": ("'path';'label'", "'{p}';'{l}'", {}),
    "Google Sheets": ("File name,Class,", "{p},{l},", {"end": "\r\n"}),
    "R, write.csv": ('"","path","label"', '"{n}","{p}","{l}"', {}),
    "R, write.csv2": ('"";"path";"label"', '"{n}";"{p}";"{l}"', {"encoding": "latin-1"}),
    "R, write.table": ('"path" "label"', '"{n}" "{p}" "{l}"', {"suffix": ".txt"}),
    "R, tabs": ('"path"\t"label"', '"{n}"\t"{p}"\t"{l}"', {"suffix": ".tsv"}),
    "pandas, index": (",path,label", "{n},{p},{l}", {}),
    "pandas, two indices": (",Unnamed: 0,path,label", "{n},{n},{p},{l}", {}),
    "pandas, two headers": ("image,image\npath,label", "{p},{l}", {}),
    "SPSS": ("Bild;Label;Alter", "{p};{l};{n},00", {"encoding": "utf-8-sig", "end": "\r\n"}),
    "SAS": ("IMAGE_PATH,CLASS,AGE", '"{p}","{l}",.', {}),
    "Stata": ("path,species,species_code", "{p},{l},{c}", {}),
    "Matlab, writetable": ("Files,Labels", "{p},{l}", {}),
    "MySQL, batch": ("id\tpath\tlabel", "{n}\t{p}\t{l}", {"suffix": ".tsv"}),
    "MySQL, boxes": ("| path | label |\n+---+---+", "| {p} | {l} |", {"suffix": ".txt"}),
    "PostgreSQL": ("id,path,label", "{n},{p},{l}", {}),
    "SQLite, list": ("id|path|label", "{n}|{p}|{l}", {}),
    "Markdown": ("| path | label |\n|---|---|", "| {p} | {l} |", {"suffix": ".txt"}),
    "VoTT": ('"image","xmin","ymin","label"', '"{f}",0,4,"{l}"', {}),
    "CVAT": ("image_name,label,frame", "{p},{l},{n}", {}),
    "Label Studio": ("image,id,choice,annotator", "{f},{n},{l},1", {}),
    "Labelbox": ("External ID,Labeled Data,Label", "{f},https://x/{f},{l}", {}),
    "Roboflow, boxes": ("filename,width,height,class,xmin", "{f},4,4,{l},0", {}),
    "Roboflow, classes": ("filename, Dachs, Füchse, Luchs", "{p}, {oh}", {}),
    "one-hot, Python": ("path,Dachs,Füchse,Luchs", "{p},{ob}", {}),
    "one-hot, R": ('"","path","Dachs","Füchse","Luchs"', '"{n}","{p}",{oB}', {}),
    "Camelot": ("Absolute Path,Site Name,Species", "{p},S{g},{l}", {}),
    "Timelapse": ("File,RelativePath,DateTime,Species,Count", "{f},images,2026-01-01,{l},1", {}),
    "Wildlife Insights": ("image_id,filename,location,common_name", "{s},{f},gs://b/{f},{l}", {}),
    "MegaDetector": ("image_path,max_confidence,category", "{p},0.9,{l}", {}),
    "HAM10000": ("lesion_id,image_id,dx,sex", "L{g},{s},{l},male", {}),
    "NIH ChestX-ray": ("Image Index,Finding Labels,Patient ID", "{f},{l},{g}", {}),
    "list of DICOM files": ("File,StudyInstanceUID,PatientID,Finding", "{p},1.2.{n},P{g},{l}", {}),
    "fastai": ("name,label", "{f},{l}", {}),
    "Hugging Face": ("file_name,text", "{f},{l}", {}),
    "AutoML of Google": ("path,label", "gs://bucket/photos/{p},{l}", {}),
    "SageMaker": (
        "",
        '{{"source-ref": "s3://b/photos/{p}", "class": "{l}"}}',
        {"suffix": ".jsonl"},
    ),
    "addresses of files": ("path,label", "file:///home/me/photos/{p},{l}", {}),
    "addresses of files that are here": ("url,label", "https://example.org/photos/{p},{l}", {}),
    "absolute paths of Windows": ("path,label", "D:\\data\\photos\\images\\{f},{l}", {}),
    "a server of Windows": ("path,label", "\\\\nas\\x\\photos\\images\\{f},{l}", {}),
    "tabs, no header": ("", "{p}\t{l}", {"suffix": ".tsv"}),
    "class first, no header": ("", "{l};{p}", {}),
    "newlines in quotes": ("path,comment,label", '{p},"two\nlines",{l}', {}),
    "quotes in quotes": ("path,comment,label", '{p},"""a, b"" they said",{l}', {}),
    "UTF-32": ("path,label", "{p},{l}", {"encoding": "utf-32"}),
    "spaces that don't break": ("path,label", "{p}\u00a0,{l}\u00a0", {}),
    "comments above": ("# by me\n# 2026\npath,label", "{p},{l}", {}),
    "a comment as header": ("#path,label", "{p},{l}", {}),
    "decimal commas": ("path;label;x;y", "{p};{l};0,5;1,5", {}),
    "folds": ("path,label,fold", "{p},{l},{g}", {}),
    "empty columns": ("path,label,,,", "{p},{l},,,", {}),
}

# program → the table, and what its error says
ANSWERED: dict[str, tuple[str, str, dict[str, str], str]] = {
    "Excel, Japanese": ("path,label", "{p},ネコ{n}", {"encoding": "cp932"}, "save it as UTF-8"),
    "Excel, Chinese": ("path,label", "{p},狐狸{n}", {"encoding": "gbk"}, "save it as UTF-8"),
    "Excel, Russian": (
        "path;label",
        "{p};лиса",
        {"encoding": "cp1251"},
        "save it as UTF-8 (in Excel",
    ),
    "Excel, Greek": ("path;label", "{p};αλεπού", {"encoding": "cp1253"}, "unknown encoding"),
    "old Macs": ("path,label", "{p},{l}", {"encoding": "mac_roman"}, "unknown encoding ('FŸchse'"),
    "DOS": ("path;label", "{p};{l}", {"encoding": "cp850"}, "save it as UTF-8"),
    "Matlab, quotes": ("Files,Labels", "'{p}','{l}'", {}, "--path-column NAME"),
    "SQL": ("CREATE TABLE t (id INT);", "INSERT INTO t VALUES ('{p}','{l}');", {}, "call it path"),
    "PostgreSQL, aligned": ("path | label", "{p} | {l}\n(1 row)", {}, "write path,label"),
    "CheXpert": ("Path,Sex,AP,Dachs,Luchs", "{p},M,AP,-1.0,", {}, "--label-column NAME"),
    "crosses": ("path,Dachs,Luchs", "{p},x,", {}, "--label-column NAME"),
    "probabilities": ("path,Dachs,Luchs", "{p},0.9,0.1", {}, "--label-column NAME"),
    "iNaturalist": (
        "id,image_url,common_name",
        "9{n},https://x/9/{n}.jpg,{l}",
        {},
        "download them",
    ),
    "GBIF": ("identifier\tspecies\tclass", "{p}\t{l}\tAves{g}", {}, "both 'class' and 'species'"),
    "Zooniverse": ("image,annotations", '{f},"[{{""value"":""{l}""}}]"', {}, "keep one label"),
    "Label Studio, server": ("image,choice", "/data/upload/1/4f-{f},{l}", {}, "correct the path"),
    "empty classes": ("path,label", "{p},", {}, "give each image one class"),
    "formulas": ("path,label", '"=""{p}""",{l}', {}, "correct the path"),
}


def fill(
    header: str, row: str, encoding: str = "utf-8", end: str = "\n", suffix: str = ""
) -> bytes:
    """Return a table with all images."""
    lines = [header] if header else []
    for number, (path, label) in enumerate(TRUTH.items(), start=1):
        hot = [label == name for name in ANIMALS]
        lines.append(
            row.format(
                p=path, b=path.replace("/", "\\"), f=Path(path).name, s=Path(path).stem, l=label,
                c=ANIMALS.index(label), g=number % 4, n=number, oh=",".join(str(int(x)) for x in hot),
                ob=",".join(map(str, hot)), oB=",".join(str(x).upper() for x in hot),
            )
        )  # fmt: skip
    return (end.join(lines) + end).encode(encoding)


def test_there_are_sixty_programs() -> None:
    contents = {fill(*case[:2], **case[2]) for case in (*INDIVIDUAL.values(), *ANSWERED.values())}
    assert len(contents) == len(INDIVIDUAL) + len(ANSWERED) >= 60


@pytest.mark.parametrize("program", [*INDIVIDUAL, *ANSWERED])
def test_a_table_of_a_named_program_is_read_or_answered(program: str, photos: Path) -> None:
    header, row, options = (INDIVIDUAL.get(program) or ANSWERED[program])[:3]
    table = photos / f"table{options.get('suffix', '.csv')}"
    table.write_bytes(fill(header, row, **options))
    try:
        if program in INDIVIDUAL:
            assert read(table) == TRUTH
            return
        with pytest.raises(ValueError, match=r"table\.csv") as error:
            read(table)
        assert ANSWERED[program][3] in str(error.value)
        assert "\n" not in str(error.value)
    finally:
        table.unlink()


# ---- tables that can't be read as they are: a sentence with every problem and what to do

ROWS = "".join(f"{path},{label}\n" for path, label in TRUTH.items())


@pytest.mark.parametrize(
    ("content", "sentences"),
    [
        (
            "name,animal,site\n" + ROWS.replace("\n", ",1\n"),
            ("(--label-column NAME), or call it label", "'animal'"),
        ),
        (
            "bild,maske,label\n"
            + "".join(f"{p},{q},x\n" for p, q in zip(TRUTH, [*TRUTH][::-1], strict=True)),
            ("both 'bild' and 'maske' may name the images", "--path-column NAME"),
        ),
        ("a,b\n1,x\n2,x\n3,y\n4,y\n", ("no column is known to name the images", "--path-column")),
        (
            "path,class,species\n" + ROWS.replace("\n", ",x\n").replace("Luchs,x", "Luchs,y"),
            ("both 'class' and 'species' may hold the classes", "--label-column"),
        ),
        (
            f"path,label\n{ROWS}images/000.png,Luchs\nimages/001.png,Dachs\nimages/77.png,Dachs\n"
            "images/78.png,Dachs\nimages/002.png\n",
            (
                "line 11: images/000.png was already listed in t.csv line 2",
                "'Luchs' here, 'Dachs' there",
                "line 12: images/001.png was already",
                "line 13: images/77.png is not a file, line 14: images/78.png is not a file",
                "line 15: 1 instead of 2 values (images/002.png); write path,label",
                "correct the path",
                "keep one label for each image",
            ),
        ),
        (
            "path,label\n" + "".join(f"{number}.png,x\n" for number in range(12)),
            ("line 11: 9.png is not a file, and 2 rows more",),
        ),
        (f"path,label\n{ROWS}images/000.jpg,Dachs\n", ("line 11: images/000.jpg is not a file",)),
        (f"path,label\n{ROWS},\n", ()),
        (f"path,label\n{ROWS},Dachs\n", ("line 11: nothing is not a file",)),
        (f"path,label\n{ROWS}images/000.png,\n", ("line 11: label '' is neither a text",)),
        (
            f"path,label\n{ROWS}".replace("001.png,Füchse", "001.png,Dachs|Luchs"),
            ("1 images have several labels, such as 'Dachs|Luchs'", "keep one label"),
        ),
        (
            f"path,label\n{ROWS}".replace("001.png,Füchse", '001.png,"Dachs, Luchs"'),
            ("several labels, such as 'Dachs, Luchs'",),
        ),
        (
            f"path,label\n{ROWS}".replace("001.png,Füchse", "001.png,['Dachs']"),
            ("1 images have several labels, such as \"['Dachs']\"",),
        ),
        (
            "path,a,b\nimages/000.png,1,0\nimages/001.png,1,1\nimages/002.png,0,0\n",
            ("line 3: a and b are 1, line 4: no class is 1", "an image has one class"),
        ),
        (
            "path,cat,target\nimages/000.png,1,0\nimages/001.png,0,1\nimages/002.png,0,1\n",
            ("'cat', 'target' may be one column for each class, or 'target' all",),
        ),
        (
            "path,label,label\nimages/000.png,x,y\nimages/001.png,y,x\nimages/002.png,y,y\n",
            ("several columns are called 'label'; rename the others",),
        ),
        (
            "path,label\nimages/000.png,Füchse\n".encode() + b"images/001.png,F\xfcchse\n",
            ("is UTF-8 with lines of another encoding, or damaged; save it as UTF-8",),
        ),
        (
            b"PK\x03\x04rest of an archive",
            ("is a spreadsheet or an archive; save the table as CSV",),
        ),
        (b"path,label\n\0\0\0\0", ("is not a text",)),
        (b"path,label\n\x81\x8d,x", ("is not a text", "save it as UTF-8")),
        ("path,label,split\n" + ROWS.replace("\n", ",dev\n"), ("unknown split 'dev'; known: tr",)),
    ],
)
def test_all_problems_of_a_table_are_said_at_once(
    photos: Path, content: str | bytes, sentences: tuple[str, ...]
) -> None:
    table = photos / "t.csv"
    table.write_bytes(content if isinstance(content, bytes) else content.encode())
    try:
        if not sentences:
            assert read(table) == TRUTH
            return
        with pytest.raises(ValueError, match=r"t\.csv") as error:
            read(table)
        for sentence in sentences:
            assert sentence in str(error.value)
    finally:
        table.unlink()


def test_ids_that_name_two_files_are_refused(tmp_path: Path) -> None:
    save_all(tmp_path, "a/1.png", "b/1.png", "c/2.png", "c/2.jpg", "d/3.png", "d/4.png")
    table = write(tmp_path / "list.csv", "id,label\n1,x\n2,x\n3,y\n4,y\n")
    with pytest.raises(ValueError, match=r"line 2: 1 may be a/1.png or b/1.png, line 3: 2 may be"):
        read(table)


def test_a_file_of_another_folder_is_not_taken_for_the_one_that_is_named(tmp_path: Path) -> None:
    save_all(tmp_path, "siteB/1.png", "siteB/2.png", "train/3.png", "train/4.png")
    table = write(tmp_path / "labels.csv", "path,label\nsiteA/1.png,x\nsiteA/2.png,y\n")
    with pytest.raises(ValueError, match=r"line 2: siteA/1\.png is not a file, line 3"):
        read(table)
    # where train/ exists, train.csv means it
    save_all(tmp_path, "test/9.png")
    table = write(tmp_path / "train.csv", "id,label\n3,x\n4,y\n9,y\n")
    with pytest.raises(ValueError, match=r"line 4: 9 is not a file"):
        read(table)


def test_a_linked_folder_of_images_is_searched(tmp_path: Path) -> None:
    save_all(tmp_path / "disk", "1.png", "2.png")
    table = write(tmp_path / "set" / "train.csv", "id,label\n1,x\n2,y\n")
    (tmp_path / "set" / "images").symlink_to(tmp_path / "disk")
    (tmp_path / "set" / "up").symlink_to(tmp_path)
    assert read(table) == {"images/1.png": "x", "images/2.png": "y"}


def test_guesses_are_in_the_plan(photos: Path) -> None:
    rows = "".join(f"{path[7:10]} ;{label}\r\n" for path, label in TRUTH.items())
    table = write(photos / "list.csv", f"Dateiname;Art\r\n{rows}", "cp1252")
    guesses = list_notes(table)
    table.unlink()
    for phrase in (
        "list.csv: text in Windows-1252",
        "semicolons between columns",
        f"spaces around {COUNT} values removed",
        "image in 'Dateiname', label in 'Art'",
        f".png added {COUNT} times",
        f"found in images/ {COUNT} times",
    ):
        assert phrase in guesses


def test_columns_may_be_named(photos: Path) -> None:
    rows = "".join(f"{path},x,{label}\n" for path, label in TRUTH.items())
    table = write(photos / "list.csv", f"Dateiname,Ort,Art\n{rows}")
    assert read(table, label_column="Art") == TRUTH
    assert read(table, path_column="dateiname", label_column="art") == TRUTH
    with pytest.raises(ValueError, match="no column 'Name'; its columns are 'Dateiname', 'Ort'"):
        read(table, path_column="Name")
    # a model finds them again in another table of these columns
    other = write(photos / "other.csv", f"Dateiname,Ort,Art\n{rows}")
    trained = RecordedImages({"label_column": "Art"})
    assert open_for_model(other, recorded=trained).split().class_names == ANIMALS
    # also where the folder is named, and other ones where the user names them
    table.unlink()
    assert open_for_model(photos, recorded=trained).split().class_names == ANIMALS
    rule = LabelRule(label_column="Ort")
    with pytest.raises(ValueError, match="fewer than two classes: 'x'"):
        open_for_model(photos, recorded=trained, labels=rule)
    own = RecordedImages({"name": "folder", "root": str(other), "label_column": "Art"})
    with pytest.raises(ValueError, match="label_column Ort is not that of this model's training"):
        open_for_model(str(other), recorded=own, labels=rule)
    with pytest.raises(ValueError, match="label_column are for folders and tables"):
        open_for_model("digits", recorded=trained, labels=rule)
    other.unlink()


@pytest.mark.parametrize(
    ("column", "values", "splits"),
    [
        ("is_valid", ("False", "True"), ("train", "validation")),
        ("is_test", ("0", "1"), ("train", "test")),
        ("is_train", ("1", "0"), ("train", "test")),
        ("Set", ("TRAIN", "Val"), ("train", "validation")),
        ("subset", ("training", "dev"), ("train", "validation")),
        ("Usage", ("Training", "PrivateTest"), ("train", "test")),
    ],
)
def test_a_column_of_splits_is_used(
    tmp_path: Path, column: str, values: tuple[str, str], splits: tuple[str, str]
) -> None:
    paths = grid("a", count=20)
    save_all(tmp_path, *paths)
    rows = [f"{path},{'xy'[n % 2]},{values[n >= 16]}" for n, path in enumerate(paths)]
    table = write(tmp_path / "t.csv", "\n".join([f"path,label,{column}", *rows]))
    assert list(read(table, splits[1])) == paths[16:]
    assert set(read(table, "train")).isdisjoint(paths[16:])
    assert f"split in {column!r}" in list_notes(table)


@pytest.mark.parametrize(
    ("column", "values"), [("fold", "01234"), ("set", "abcde"), ("valid", "01011")]
)
def test_a_column_that_looks_like_a_split_is_not_passed_over(
    photos: Path, column: str, values: str
) -> None:
    rows = [f"{path},{label},{values[n % 5]}" for n, (path, label) in enumerate(TRUTH.items())]
    table = write(photos / "t.csv", "\n".join([f"path,label,{column}", *rows]))
    notes = list_notes(table)
    table.unlink()
    assert f"the column {column!r} of t.csv" in notes
    assert "looks like a split and is not used; call it split" in notes


def test_labels_that_look_wrong_are_said(tmp_path: Path) -> None:
    labels = ["cat", "Cat", "NaN", "N/A", "dog", "dog", "cat"]
    save_all(tmp_path, *grid("a", count=len(labels)))
    rows = [f"a/{n}.png,{label}" for n, label in enumerate(labels)]
    notes = list_notes(write(tmp_path / "t.csv", "\n".join(["path,label", *rows])))
    assert "labels that look missing are classes: 'NaN' 1, 'N/A' 1" in notes
    assert "classes that differ in case or zeros alone: 'Cat' 1, 'cat' 2" in notes
    # joined labels without a class of their own
    rows = [f"a/{n}.png,{label}" for n, label in enumerate(["a+b", "b+c", "a+c", "a+b", "d", "e"])]
    notes = list_notes(write(tmp_path / "t.csv", "\n".join(["path,label", *rows])))
    assert (
        "3 classes hold '+', such as 'a+b': if these are several labels, data.task=multi" in notes
    )


def test_tags_between_spaces_are_said(tmp_path: Path) -> None:
    tags = ["clear road", "clear water", "haze road", "haze water", "clear farm", "haze farm"]
    species = ["red fox", "grey fox", "red deer", "sika deer", "grey wolf", "brown bear"]
    for labels, is_said in ((tags, True), (species, False)):
        save_all(tmp_path, *grid("a", count=6))
        rows = [f"a/{n}.png,{label}" for n, label in enumerate(labels)]
        notes = list_notes(write(tmp_path / "t.csv", "\n".join(["image,label", *rows])))
        assert ("6 classes hold ' ', such as 'clear road': if these are sev" in notes) == is_said


def test_one_of_several_columns_of_labels_is_named(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("a", count=6))
    rows = [f"a/{n}.png,{'xy'[n % 2]},z" for n in range(6)]
    notes = list_notes(write(tmp_path / "t.csv", "\n".join(["path,label,label_2", *rows])))
    assert "'label_2' of t.csv is not used: an image has one class, in 'label'" in notes
    rows = [f"a/{n}.png,{('cat', 'dog', 'cat and dog')[n % 3]}" for n in range(6)]
    notes = list_notes(write(tmp_path / "t.csv", "\n".join(["path,label", *rows])))
    assert "'cat and dog' may be several labels in one" in notes


def test_an_image_in_two_folders_of_classes_is_said(tmp_path: Path) -> None:
    for number in range(12):
        for name in ("cat", "dog") if number < 3 else ("cat", "dog")[number % 2 :][:1]:
            path = tmp_path / name / f"{number}.png"
            path.parent.mkdir(exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 256, (9, 9, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(path)
    rule = SplitRule(group_duplicates=True)
    notes = open_dataset("folder", root=tmp_path, rule=rule).split("train").notes
    assert "6 images are in two classes, with the same pixels; keep each image in one" in notes[0]


@pytest.mark.parametrize(
    ("members", "sentence"),
    [
        (("jpg", "json"), "no label 0.cls for the image 0, only .json 4; write its class"),
        (("jpg", "xmp", "json"), "only .json 4, .xmp 4"),
        (("image.jpg", "label.cls"), "holds no images <key>.jpg, only .cls 4, .jpg 4; a sample is"),
        (("jpg", "png", "cls"), "two images or labels of the key 0"),
    ],
)
def test_shards_without_cls_say_what_they_hold(
    tmp_path: Path, members: tuple[str, ...], sentence: str
) -> None:
    with tarfile.open(tmp_path / "train-0000.tar", "w") as tar:
        for name in (f"{number}.{member}" for number in range(4) for member in members):
            information = tarfile.TarInfo(name)
            # a .json file without labels
            content = b"{}" if name.endswith("json") else b"1"
            information.size = len(content)
            tar.addfile(information, io.BytesIO(content))
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path)


@pytest.mark.parametrize("column", ["Patient ID", "lesion_id", "Standort", "site", "camera", "ID"])
def test_a_column_that_looks_like_groups_is_not_passed_over(photos: Path, column: str) -> None:
    rows = [f"{path},{label},{n % 3}" for n, (path, label) in enumerate(TRUTH.items())]
    table = write(photos / "t.csv", "\n".join([f"path,label,{column}", *rows]))
    notes = list_notes(table)
    says_so = f"the column {column!r} of t.csv (3 values) looks like groups of images" in notes
    assert says_so == (column != "ID")
    # the column of the classes is none of groups
    assert "looks like groups" not in list_notes(table, label_column=column)
    table.unlink()


def test_numbers_of_pandas_and_of_classes_are_ordered_as_numbers(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("a", count=12))
    rows = [f"a/{n}.png,{n}.0" for n in range(12)]
    table = write(tmp_path / "t.csv", "\n".join(["path,label", *rows]))
    assert open_place(table).split("all").class_names == tuple(map(str, range(12)))
    assert "classes without .0" in list_notes(table)


def test_an_image_that_is_listed_again_counts_once(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("a"))
    rows = "a/0.png,x\na/1.png,y\na/2.png,x\na/3.png,y\n./a/1.png,y\n"
    table = write(tmp_path / "t.csv", f"path,label\n{rows}")
    assert len(read(table)) == 4
    assert "1 rows listed an image again, with the same label" in list_notes(table)
    table = write(tmp_path / "t.csv", f"path,label,split\n{rows}".replace("\n", ",train\n", 9))
    write(
        table,
        table.read_text()
        .replace("split,train", "split")
        .replace("./a/1.png,y,train", "./a/1.png,y,test"),
    )
    with pytest.raises(ValueError, match=r"line 6: a/1\.png .* \(test here, train there\); keep"):
        read(table)


def test_a_damaged_table_is_refused_in_one_sentence(photos: Path) -> None:
    random = np.random.default_rng(0)
    errors: list[str] = []
    table = photos / "t.csv"
    for number in range(200):
        content = bytearray(STYLES[number % len(STYLES)].content)
        for _ in range(random.integers(1, 4)):
            place = int(random.integers(len(content)))
            content[place : place + int(random.integers(3))] = bytes(
                random.integers(32, 127, random.integers(3)).tolist()
            )
        table.write_bytes(content)
        try:
            labels = read(table)
        except (ValueError, OSError) as error:
            errors.append(str(error))
        else:
            # a byte of a label may be another one, but no image gets the label of another
            assert sum(TRUTH[path] not in labels[path] for path in labels) <= 3
    table.unlink()
    assert 20 < len(errors) < 190
    assert not any("\n" in error for error in errors)


# ---- folders with a table


def test_kaggle_s_three_files(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("train", count=8), *grid("test", count=8))
    labels = {f"train/{n}.png": ("pug", "beagle")[n % 2] for n in range(8)}
    rows = [f"{n},{label}" for n, label in enumerate(labels.values())]
    write(tmp_path / "train.csv", "\n".join(["id,breed", *rows]))
    write(tmp_path / "test.csv", "\n".join(["id", *map(str, range(8))]))
    write(tmp_path / "sample_submission.csv", "\n".join(["id,breed", *rows]).replace("pug", "x"))
    for place in (tmp_path, tmp_path / "train.csv"):
        assert read(place) == labels
        assert "folders that look like splits: images in test/ 8" in list_notes(place)
    assert "images in test/ 8" in open_place(tmp_path).describe_files()
    # a table that can't be read says why
    write(
        tmp_path / "train.csv",
        "\n".join(["id,breed,age", *(f"{row},{n}" for n, row in enumerate(rows))]),
    )
    assert read(tmp_path) == labels
    write(tmp_path / "train.csv", "\n".join(["id,tier,age", *(f"{row},3" for row in rows)]))
    with pytest.raises(ValueError, match=r"has no folders of classes\. .*train\.csv: no column is"):
        read(tmp_path)
    assert read(tmp_path, label_column="tier") == labels


def test_tables_named_like_splits_are_the_splits(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("train", "val", count=8))
    for split in ("train", "val"):
        rows = [f"{n},{'xy'[n % 2]}" for n in range(8)]
        write(tmp_path / f"{split}.csv", "\n".join(["id,label", *rows]))
    assert list(read(tmp_path, "validation")) == grid("val", count=8)


def test_a_table_beside_folders_is_not_passed_over(tmp_path: Path) -> None:
    paths = grid("SITE01/CAM1", "SITE02/CAM1", count=8)
    save_all(tmp_path, *paths)
    rows = [f"{path};{'xyz'[n % 3]};4" for n, path in enumerate(paths)]
    text = "\r\n".join(["Dateiname;Art;Zahl", *rows]).replace("/", "\\")
    table = write(tmp_path / "Auswertung.csv", text, "utf-8-sig")
    assert "Auswertung.csv in" in list_notes(tmp_path)
    assert f"is not read: the folders are the classes; vit train {table} reads it" in list_notes(
        tmp_path
    )
    # of several the one of the training images, and never a form for answers
    for name in ("a_submission.csv", "others.csv", "train.csv"):
        write(tmp_path / "more" / name, text)
    save_all(tmp_path / "more", *grid("train/a", "train/b", "test", count=8))
    notes = list_notes(tmp_path / "more")
    assert "others.csv, train.csv in more/ is not read" in notes
    assert f"vit train {tmp_path / 'more' / 'train.csv'} reads it (--label-column NAME" in notes
    assert "more/test holds images in no folder of a class: they are not used" in notes
    shutil.rmtree(tmp_path / "more")
    truth = {path: "xyz"[n % 3] for n, path in enumerate(paths)}
    assert read(table, label_column="Art") == read(tmp_path, label_column="Art") == truth


def test_roboflow_s_columns_of_zeros_and_ones_are_classes(tmp_path: Path) -> None:
    for split in ("train", "valid", "test"):
        save_all(tmp_path, *grid(split))
        rows = "".join(f"{n}.png, {n % 2}, {1 - n % 2}\n" for n in range(4))
        write(tmp_path / split / "_classes.csv", f"filename, cat, dog\n{rows}")
    expected = {f"train/{n}.png": ("dog", "cat")[n % 2] for n in range(4)}
    assert read(tmp_path, "train") == expected
    assert list(read(tmp_path, "validation")) == grid("valid")
    assert "one column for each class (cat, dog)" in list_notes(tmp_path)


# ---- folders and published sets


def test_a_flat_val_with_its_labels_is_read(tmp_path: Path) -> None:
    wnids = ("n01440764", "n02102040", "n03000684")
    save_all(tmp_path, *grid(*(f"train/{wnid}" for wnid in wnids)))
    names = [f"ILSVRC2012_val_{n:08d}" for n in range(1, 7)]
    save_all(tmp_path, *(f"val/{name}.png" for name in names))
    with pytest.raises(ValueError, match=r"val holds images in no folder of a class; move them"):
        read(tmp_path)
    shuffled = [wnids[n * 2 % 3] for n in range(6)]
    words = {"n01440764": "tench", "n02102040": "English springer", "n03000684": "chain saw"}
    truth = {f"val/{n}.png": words[w] for n, w in zip(names, shuffled, strict=True)}
    pairs = list(zip(names, shuffled, strict=True))
    files = {
        "LOC_val_solution.csv": "\n".join(
            ["ImageId,PredictionString", *(f"{n},{w} 1 2 3 4 " for n, w in reversed(pairs))]
        ),
        "val/val_annotations.txt": "\n".join(f"{n}.png\t{w}\t0\t0\t9\t9" for n, w in pairs),
        "val.txt": "\n".join(f"{n}.png {wnids.index(w)}" for n, w in pairs),
        "imagenet_2012_validation_synset_labels.txt": "\n".join(shuffled),
    }
    for name, text in files.items():
        label_file = write(tmp_path / name, text)
        assert read(tmp_path, "test") == truth, name
        notes = list_notes(tmp_path)
        assert f"classes of val/ in {label_file.name}" in notes
        assert "is not read" not in notes
        assert open_dataset("imagenet", root=tmp_path).split("test").class_names == tuple(
            words.values()
        )
        chosen = open_dataset("folder", root=tmp_path, classes=list(wnids[1:])).split("test")
        assert len(chosen) == 4
        label_file.unlink()
    # ILSVRC's own numbers are in another order
    write(tmp_path / "ILSVRC2012_validation_ground_truth.txt", "1\n2\n3\n1\n2\n3\n")
    with pytest.raises(ValueError, match=r"numbers for classes .* take LOC_val_solution\.csv or"):
        read(tmp_path)


def test_tiny_imagenet_as_downloaded(tmp_path: Path) -> None:
    wnids = ("n01443537", "n01629819")
    save_all(tmp_path, *grid(*(f"train/{wnid}/images" for wnid in wnids), count=20))
    save_all(tmp_path, *grid("val/images", "test/images"))
    rows = "".join(f"{n}.png\t{wnids[n % 2]}\t0\t0\t62\t62\n" for n in range(4))
    write(tmp_path / "val/val_annotations.txt", rows)
    write(tmp_path / "wnids.txt", "\n".join(reversed(wnids)))
    write(tmp_path / "words.txt", "n01443537\tgoldfish, Carassius auratus\n")
    labels = read(tmp_path, "test")
    assert list(labels) == [f"val/images/{n}.png" for n in range(4)]
    assert labels["val/images/0.png"] == labels["val/images/2.png"] == "goldfish"
    assert len(read(tmp_path, "train")) + len(read(tmp_path, "validation")) == 40
    notes = list_notes(tmp_path)
    assert "test holds images in no folder of a class: they are not used" in notes


def test_a_flat_test_beside_folders_of_classes_is_no_class(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("cat", "dog", "test"))
    with pytest.raises(ValueError, match=r"holds test/ beside folders of classes: if it is a cla"):
        read(tmp_path)
    chosen = open_dataset("folder", root=tmp_path, classes=["cat", "dog", "test"]).split("all")
    assert chosen.class_names == ("cat", "dog", "test")


def test_folders_that_are_named_like_splits_are_no_classes(tmp_path: Path) -> None:
    # the cats and dogs of Kaggle
    save_all(tmp_path / "a", *(f"train/{c}.{n}.png" for c in ("cat", "dog") for n in range(6)))
    save_all(tmp_path / "a", *grid("test1", count=6))
    with pytest.raises(ValueError, match=r"no folder of a class; their names look.*cat 6, dog 6"):
        read(tmp_path / "a")
    assert set(read(tmp_path / "a", label_by=r"([a-z]+)[.]").values()) == {"cat", "dog"}
    assert "6 images have no class" in list_notes(tmp_path / "a", label_by=r"([a-z]+)[.]")
    save_all(tmp_path / "b", *grid("train_images", "test_images"))
    with pytest.raises(ValueError, match="train_images holds images in no"):
        read(tmp_path / "b")
    write(tmp_path / "b" / "train.csv", "id,label\n0,x\n1,y\n2,x\n3,y\n")
    assert list(read(tmp_path / "b")) == grid("train_images")
    assert "images in test_images/ 4" in list_notes(tmp_path / "b")
    save_all(tmp_path / "c", *grid("train_set/a", "train_set/b", "test_set/a", "test_set/b"))
    with pytest.raises(ValueError, match="holds test_set/, train_set/: call the splits train, val"):
        read(tmp_path / "c")


def test_folders_of_other_programs_are_no_classes(tmp_path: Path) -> None:
    sentence = "{} holds images in no folder of a class; move them into folders of classes, or"
    for name, flat, folders in (
        ("masks", "images", ("images", "masks")),
        ("coco", "images", ("images",)),
        ("voc", "JPEGImages", ("JPEGImages", "Annotations")),
        ("yolo", "train/images", ("train/images", "train/labels", "val/images", "val/labels")),
        ("camera", "", ("",)),
    ):
        for folder in folders:
            place = tmp_path / name / folder
            place.mkdir(parents=True)
            if folder.casefold().endswith(("images", "masks")) or not folder:
                save_all(place, *(f"IMG_{number}.png" for number in range(4)))
        write(tmp_path / name / "annotations.json", "{}")
        with pytest.raises(ValueError, match=re.escape(sentence.format(tmp_path / name / flat))):
            read(tmp_path / name)
    chosen = open_dataset("folder", root=tmp_path / "masks", classes=["images", "masks"])
    assert chosen.split("all").class_names == ("images", "masks")

    save_all(tmp_path / "folds", *grid(*(f"fold{n}/{c}" for n in range(3) for c in ("cat", "dog"))))
    with pytest.raises(ValueError, match=r"fold0, fold1, fold2, which are no classes") as error:
        read(tmp_path / "folds")
    expression = re.search(r"--label-by '(.*?)'", str(error.value))
    assert expression is not None
    assert set(read(tmp_path / "folds", label_by=expression[1]).values()) == {"cat", "dog"}

    save_all(tmp_path / "below", *grid("cat/train", "cat/val", "dog/train", "dog/val"))
    assert "cat/train and cat/val look like splits and are not used" in list_notes(
        tmp_path / "below"
    )


@pytest.mark.parametrize(
    ("folders", "sentence"),
    [
        (
            ("cars_train", "cars_test"),
            "holds cars_test, cars_train: call the splits train, val and",
        ),
        (("a/abbey", "a/airport", "b/bar"), "holds a, b, which are no classes; if the folders in"),
        (("images/tart", "images/pie", "meta"), "which are no classes; did you mean .*images"),
        (("jpg",), "jpg holds images in no folder of a class; move them into folders"),
        ((), r"holds no images, only .bin 1; check the path"),
    ],
)
def test_neighbours_of_published_sets_are_answered(
    tmp_path: Path, folders: tuple[str, ...], sentence: str
) -> None:
    save_all(tmp_path, *grid(*(folder for folder in folders if folder != "meta")))
    for name in ("meta/train.json",) if "meta" in folders else ("imagelabels.bin",):
        write(tmp_path / name, "{}")
    with pytest.raises(ValueError, match=sentence):
        read(tmp_path)


def test_letters_are_classes_and_trainval_is_a_split(tmp_path: Path) -> None:
    save_all(tmp_path / "signs", *grid("A", "B"))
    assert open_place(tmp_path / "signs").split("all").class_names == ("A", "B")
    save_all(tmp_path / "voc", *grid("trainval/cat", "trainval/dog", "test/cat", "test/dog"))
    assert list(read(tmp_path / "voc", "test")) == grid("test/cat", "test/dog")


def test_a_flat_split_s_table_may_have_other_columns_first(tmp_path: Path) -> None:
    """The traffic signs of Kaggle."""
    save_all(tmp_path, *grid("Train/0", "Train/9", "Train/10"), *grid("Test", count=6))
    for split, rows in (
        ("Train", [f"4,4,{sign},Train/{sign}/{n}.png" for sign in (0, 9, 10) for n in range(4)]),
        ("Test", [f"4,4,{(9, 0, 10)[n % 3]},Test/{n}.png" for n in range(6)]),
    ):
        write(tmp_path / f"{split}.csv", "\n".join(["Width,Height,ClassId,Path", *rows]))
    labels = read(tmp_path, "test")
    assert labels == {f"Test/{n}.png": ("9", "0", "10")[n % 3] for n in range(6)}


def test_photos_with_large_suffixes_and_names_of_any_language_are_found(tmp_path: Path) -> None:
    save_all(tmp_path, "猫/1.JPEG", "猫/été 😀.BMP", "dog/1.JPEG", "dog/2.WEBP")
    splits = open_place(tmp_path)
    assert len(read(tmp_path)) == 4
    assert splits.split("all").class_names == ("dog", "猫")
    assert splits.split("all").image(3).size == (4, 4)


def test_cub_as_downloaded(tmp_path: Path) -> None:
    names = ("001.Black_footed_Albatross", "002.Laysan_Albatross")
    paths = [f"{names[n % 2]}/{n}.png" for n in range(8)]
    save_all(tmp_path, *(f"images/{path}" for path in paths))
    lists = {
        "images": [f"{n} {path}" for n, path in enumerate(paths, 1)],
        "image_class_labels": [f"{n + 1} {n % 2 + 1}" for n in range(8)],
        "train_test_split": [f"{n + 1} {int(n < 6)}" for n in range(8)],
        "classes": [f"{n} {name}" for n, name in enumerate(names, 1)],
    }
    for name, lines in lists.items():
        write(tmp_path / f"{name}.txt", "\n".join(lines))
    assert find_kind(tmp_path) == "cub200"
    assert read(tmp_path) == {f"images/{path}": path.partition("/")[0] for path in paths}
    assert list(read(tmp_path, "test")) == [f"images/{path}" for path in paths[6:]]


def test_pets_as_downloaded(tmp_path: Path) -> None:
    names = [("Abyssinian", "great_pyrenees")[n % 2] + f"_{n}" for n in range(8)]
    save_all(tmp_path, *(f"images/{name}.jpg" for name in names))
    for split, chosen in (("trainval", names[:6]), ("test", names[6:])):
        lines = [f"{name} 1 1 1" for name in chosen]
        write(tmp_path / f"annotations/{split}.txt", "\n".join(lines))
    assert find_kind(tmp_path) == "oxford_pets"
    assert read(tmp_path, "test") == {
        "images/Abyssinian_6.jpg": "Abyssinian",
        "images/great_pyrenees_7.jpg": "Great Pyrenees",
    }


def test_vtab_s_lists(tmp_path: Path) -> None:
    images = {"train": 12, "val": 6, "test": 6}
    lists = {}
    for split, count in images.items():
        paths = grid(f"images/{split}", count=count)
        save_all(tmp_path, *paths)
        lists[split] = [f"{path} {10 * (n % 3)}" for n, path in enumerate(paths)]
    for name, lines in {
        "train800": lists["train"],
        "val200": lists["val"],
        "train800val200": lists["train"] + lists["val"],
        "test": lists["test"],
    }.items():
        write(tmp_path / f"{name}.txt", "\n".join(lines))
    assert find_kind(tmp_path) == "text_lists"
    for split, count in (("train", 12), ("validation", 6), ("test", 6)):
        assert len(read(tmp_path, split)) == count
    assert read(tmp_path)["images/val/5.png"] == "20"
    assert "train800val200.txt not read" in list_notes(tmp_path)
    (tmp_path / "train800.txt").unlink()
    (tmp_path / "val200.txt").unlink()
    assert open_place(tmp_path).source.origins.keys() == {"train", "test"}


def test_packed_files_of_torchvision(tmp_path: Path) -> None:
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 28, 28), dtype=np.uint8)
    labels = (np.arange(20) % 10).astype(np.uint8)
    for prefix in ("train", "t10k"):
        images = struct.pack(">4B3I", 0, 0, 8, 3, *pixels.shape) + pixels.tobytes()
        numbers = struct.pack(">4BI", 0, 0, 8, 1, len(labels)) + labels.tobytes()
        for kind, content in (("images-idx3", images), ("labels-idx1", numbers)):
            (raw / f"{prefix}-{kind}-ubyte.gz").write_bytes(gzip.compress(content))
    packed = open_dataset("fashion_mnist", root=tmp_path).split("test")
    assert packed.class_names[:2] == ("T-shirt/top", "Trouser")
    for file in raw.glob("*.gz"):
        file.with_suffix("").write_bytes(gzip.decompress(file.read_bytes()))
    # torchvision's own way to the same files
    unpacked = open_dataset("fashion_mnist", root=tmp_path).split("test")
    assert list(packed.ids) == list(unpacked.ids)
    assert np.array_equal(packed.image(7), unpacked.image(7))


@pytest.mark.parametrize(
    ("names", "classes"),
    [
        ("cat.{n}.png dog.{n}.png", ("cat", "dog")),
        ("cat_{n}.png dog_{n}.png", ("cat", "dog")),
        ("red fox ({n}).png wolf ({n}).png", ("red fox", "wolf")),
        ("{n}-cat.png {n}-dog.png", ("cat", "dog")),
    ],
)
def test_classes_in_the_names_of_files(
    tmp_path: Path, names: str, classes: tuple[str, ...]
) -> None:
    templates = re.findall(r"\S.*?\.png", names)
    files = [template.format(n=n) for template in templates for n in range(6)]
    save_all(tmp_path, *files)
    with pytest.raises(ValueError, match="their names look like classes") as error:
        read(tmp_path)
    expression = re.search(r"--label-by '(.*?)'", str(error.value))
    assert expression is not None
    labels = read(tmp_path, label_by=expression[1])
    assert len(labels) == 12
    assert set(labels.values()) == set(classes)
    assert all(label in path for path, label in labels.items())
    # below a folder, too, and for a model that was trained so
    opened = open_for_model(tmp_path, recorded=RecordedImages({"label_by": expression[1]}))
    assert opened.split().class_names == classes


def test_label_by_says_what_it_leaves_out(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("train/cat", "train/dog"), "notes/9.png")
    labels = read(tmp_path, label_by="(cat|dog)")
    assert set(labels) == set(grid("train/cat", "train/dog"))
    notes = list_notes(tmp_path, label_by="(cat|dog)")
    assert "1 images have no class by data.label_by, such as notes/9.png" in notes
    for wrong, sentence in (("(", "not a regular"), ("cat", "has 0 groups"), ("(x)", "no class")):
        with pytest.raises(ValueError, match=sentence):
            read(tmp_path, label_by=wrong)
    save_all(tmp_path / "flat", "train/cat.0.png", "train/dog.0.png", "test/cat.1.png")
    with pytest.raises(ValueError, match="finds test and train, which are splits"):
        read(tmp_path / "flat", label_by="^([a-z]+)")
    with pytest.raises(ValueError, match="for folders and tables, not for data"):
        open_dataset("digits", labels=LabelRule(label_by="(x)"))


def test_folders_of_systems_are_left_out_with_a_count(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("cat", "dog"))
    hidden = ("@eaDir/cat", "cat/@eaDir", "dog/.thumbnails", "__MACOSX", "#recycle", ".ipynb_ch")
    hidden += ("cat/Thumbnails", "_gsdata_", "dog/_vti_cnf")
    save_all(tmp_path, *grid(*hidden, count=3))
    splits = open_place(tmp_path)
    assert splits.split("all").class_names == ("cat", "dog")
    text = splits.describe_files()
    assert "8 images in 2 classes" in text
    assert "27 not used" in text
    assert "images in folders @eaDir 6" in text


def test_a_split_of_fewer_classes_is_matched_by_name(tmp_path: Path) -> None:
    save_all(tmp_path, *grid("train/a", "train/b", "train/c", "val/b", "val/c"))
    assert set(read(tmp_path, "test").values()) == {"b", "c"}
    assert read(tmp_path, "test")["val/b/0.png"] == "b"
    save_all(tmp_path, *grid("val/C"))
    with pytest.raises(ValueError, match=r"val holds class 'C', which .*; call it c, too"):
        read(tmp_path)


# ---- one order of classes


def test_whole_numbers_are_ordered_as_numbers(tmp_path: Path) -> None:
    assert sort_class_names(["10", "9", "cat", "-1", "007"]) == ("-1", "007", "9", "10", "cat")
    numbers = tuple(map(str, range(12)))
    save_all(tmp_path, *grid(*(f"photos/{number}" for number in numbers)))
    assert open_place(tmp_path / "photos").split("train").class_names == numbers
    rows = [json.dumps({"path": f"photos/{n}/0.png", "label": n}) for n in range(12)]
    table = write(tmp_path / "t.jsonl", "\n".join(rows))
    assert open_place(table).split("all").class_names == numbers
    pixels = np.zeros((24, 4, 4, 3), dtype=np.uint8)
    splits = find_python_objects((pixels, [str(n % 12) for n in range(24)]), None)
    assert splits.load("train").class_names == numbers


def test_a_run_with_classes_in_another_order_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save_all(tmp_path, *grid(*(f"photos/{number}" for number in range(11))))
    overrides = [*TINY_RUN, f"data.root={tmp_path / 'photos'}", "data.name=folder"]
    overrides += ["train.max_steps=1", "train.batch_size=8"]
    options = {"output": tmp_path / "run", "overrides": overrides}
    with monkeypatch.context() as former:
        former.setattr("vit.data.sources.folders.sort_class_names", lambda names: sorted(names))
        run = vit.train("digits", **options)
    assert run.bundle.class_names[:3] == ("0", "1", "10")
    with pytest.raises(ValueError, match="another run: the training images are others"):
        vit.train("digits", **options, resume=True)


def test_a_name_that_looks_like_an_index_is_told_apart() -> None:
    names = ("1", "2", "10")
    assert [_find_class(name, names) for name in names] == [0, 1, 2]
    assert [_find_class(index, names) for index in range(3)] == [0, 1, 2]
    with pytest.raises(ValueError, match="unknown class '0'; known: auto, all, top3, 1, 2, 10"):
        _find_class("0", names)
    assert _find_class("1", ("cat", "dog")) == 1
    # one of them is a number, so "1" may have been meant as a name
    with pytest.raises(ValueError, match="unknown class '1'; known: auto, all, top3, 2, cat, dog"):
        _find_class("1", ("2", "cat", "dog"))


@pytest.mark.extended
@pytest.mark.parametrize("names", [tuple(map(str, range(11))), ("1", "2", "10", "cat")])
def test_an_index_means_the_same_class_everywhere(
    names: tuple[str, ...], save_model: SaveModel, tmp_path: Path
) -> None:
    import onnxruntime
    import timm
    import torch
    from fastapi.testclient import TestClient
    from transformers import pipeline

    from vit.deploy.serve.app import build_app

    path = save_model(tmp_path / "model.safetensors", class_names=names)
    bundle = vit.load_bundle(path)
    photos = tmp_path / "photos"
    random = np.random.default_rng(0)
    for name in names:
        for number in range(3):
            (photos / name).mkdir(parents=True, exist_ok=True)
            pixels = random.integers(0, 256, (2, 2, 3), dtype=np.uint8)
            image = Image.fromarray(pixels).resize((16, 16), Image.Resampling.NEAREST)
            image.save(photos / name / f"{number}.png")
    assert open_place(photos).split("all").class_names == names
    files = sorted(map(str, photos.rglob("*.png")))
    images = [read_image(Path(file)) for file in files]
    with torch.no_grad():
        logits = bundle.model(bundle.preprocess(images))
    expected = logits.argmax(dim=1).tolist()
    assert len(set(expected)) > 1

    found = vit.predict(bundle, files, precision="float32").predictions
    best = [prediction.classes[0][:2] for prediction in found]
    assert best == [(index, names[index]) for index in expected]
    with TestClient(build_app(bundle), base_url="http://127.0.0.1:8000") as client:
        answer = client.post("/predict", files={"image": Path(files[0]).read_bytes()}).json()
    assert (answer["classes"][0]["index"], answer["classes"][0]["name"]) == best[0]

    vit.export_model(path, output=tmp_path / "onnx")
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["class_names"]) == list(names)
    pixels = bundle.preprocess(images).numpy()
    (probabilities,) = session.run(["probabilities"], {"pixel_values": pixels})
    assert probabilities.argmax(axis=1).tolist() == expected
    vit.export_model(path, output=tmp_path / "hf", format="huggingface")
    classify = pipeline("image-classification", model=str(tmp_path / "hf"))
    assert [rows[0]["label"] for rows in classify(files)] == [name for _, name in best]
    assert tuple(classify.model.config.id2label.values()) == names
    vit.export_model(path, output=tmp_path / "timm", format="timm")
    model = timm.create_model(f"local-dir:{tmp_path / 'timm'}", pretrained=True).eval()
    with torch.no_grad():
        assert model(bundle.preprocess(images)).argmax(dim=1).tolist() == expected
    assert tuple(model.pretrained_cfg["label_names"]) == names

    # the files of an evaluation name classes, in the same order
    result = vit.evaluate(bundle, data=photos, device="cpu", precision="float32")
    result.save(tmp_path / "evaluation")
    assert [each.name for each in result.evaluation.per_class] == list(names)
    with (tmp_path / "evaluation" / "predictions.csv").open() as file:
        rows = {row["path"]: row for row in csv.DictReader(file)}
    for file, (_, name) in zip(files, best, strict=True):
        row = rows[Path(file).relative_to(photos).as_posix()]
        assert (row["label"], row["predicted"]) == (Path(file).parent.name, name)

    # a text of digits is a name, and a number an index
    for target, index in (("2", names.index("2")), (2, 2), (names[3], 3)):
        (explained,) = vit.explain(
            bundle, files[0], target=target, methods="gae", checks=False
        ).images
        assert explained.maps[0].target == index


@pytest.mark.parametrize(
    ("labels", "sentence"),
    [
        ([1, 2], "labels of dataset are 1, 2, not 0 to 1 without gaps"),
        ([0, 1, 3], "labels of dataset are 0, 1, 3, not 0 to 2"),
        ([0, 10**9], "not 0 to 1 without gaps"),
        ([0, 0], "names fewer than two classes"),
        (["cat", "cat"], "names fewer than two classes: 'cat'"),
    ],
)
def test_labels_from_python_count_the_classes(labels: list[object], sentence: str) -> None:
    pixels = np.zeros((len(labels), 4, 4, 3), dtype=np.uint8)
    with pytest.raises(ValueError, match=sentence):
        find_python_objects((pixels, labels), None)


def test_a_named_class_without_an_image_is_said() -> None:
    pixels = np.zeros((4, 4, 4, 3), dtype=np.uint8)
    train = find_python_objects((pixels, [0, 2, 0, 2]), ["a", "b", "c"]).load("train")
    assert train.notes == ("no training image has the class b; leave it out of class_names",)
    # a model may be evaluated on one class
    one = find_python_objects((pixels, [1] * 4), None, split="test", numbered_classes=["a", "b"])
    assert one.load("test").class_names == ("a", "b")
