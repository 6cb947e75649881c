"""Parts are written whole, each image has one row, and a job goes on where another one ended."""

import os
import pickle
import shutil
import sys
import tarfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.conftest import Launcher
from vit.data.dataset import printable
from vit.data.inputs import list_inputs
from vit.deploy.batch.inputs import (
    Listed,
    check_names,
    list_files,
    open_contents,
    read_contents,
)
from vit.deploy.batch.parts import Parts
from vit.prediction import image_predictor

FACTS = {"model": "0123", "top_k": 5}


def make_rows(*paths: str) -> pa.Table:
    return pa.table({"path": list(paths), "error": pa.nulls(len(paths), pa.string())})


def test_images_with_a_row_are_found_again(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "out", FACTS)
    assert parts.prepare(resume=False).to_pylist() == []
    parts.write(make_rows("a", "b"))
    parts.write(make_rows("c"))
    # a task that runs again replaces its part
    parts.write(make_rows("a", "b"))
    again = Parts(f"{tmp_path / 'out'}/", dict(reversed(FACTS.items())))
    assert sorted(again.prepare(resume=True).to_pylist()) == ["a", "b", "c"]
    assert pq.read_table(tmp_path / "out").num_rows == 3
    with pytest.raises(FileExistsError, match="go on with --resume"):
        again.prepare(resume=False)
    with pytest.raises(ValueError, match="another model or other options"):
        Parts(tmp_path / "out", {**FACTS, "top_k": 3}).prepare(resume=True)


def test_a_part_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = Parts(tmp_path, FACTS)

    def write_half(rows: pa.Table, path: Path) -> None:
        path.write_bytes(b"PAR1 half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", write_half)
    with pytest.raises(OSError, match="No space left"):
        parts.write(make_rows("a"))
    assert list(tmp_path.iterdir()) == []
    # a writer that was killed leaves a hidden file, which the next job removes
    (tmp_path / ".part-0.parquet.01234567.tmp").write_bytes(b"PAR1 half")
    assert parts.prepare(resume=False).to_pylist() == []
    assert list(tmp_path.iterdir()) == []


def read_all(listed: Listed, written: tuple[str, ...] = ()) -> dict[str, Any]:
    """Name → pixels, or why there are none, of the files and of what is packed."""
    rows = [listed[0]]
    for name, packed in listed[1].items():
        rows.append(pa.table([[name], [pickle.dumps(packed)]], schema=listed[0].schema))
    names = pa.array(sorted(written), pa.large_string())
    tables = [table for each in rows for table in read_contents(each, names)]
    return {name: _decode(name, image) for table in tables for name, image in open_contents(table)}


def _decode(name: str, image: Any) -> Any:
    (decoded,) = image_predictor.decode_batches([(name, image)], [Whole()], 1)
    return decoded[0][1]


class Whole:
    """Preprocessing that keeps all pixels."""

    def to_uint8(self, image: Image.Image) -> bytes:
        return image.tobytes()


def test_all_that_one_process_reads_is_listed_and_read(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    (photos / "c").mkdir(parents=True)
    contents = []
    for number, name in enumerate(("a.png", "b.png", "c/d.png")):
        Image.new("RGB", (2, 2), (number, 9, 9)).save(photos / name, "PNG")
        contents.append((photos / name).read_bytes())
    (photos / "e.png").write_bytes(b"no image")
    Path(os.fsdecode(os.fsencode(photos) + b"/f\xff.png")).write_bytes(contents[0])
    (tmp_path / "list.csv").write_text("path\nphotos/a.png\nphotos/a.png\nphotos/gone.png\n")
    with tarfile.open(tmp_path / "s.tar", "w") as tar:
        tar.add(photos / "a.png", "x/a.png")
        tar.add(photos / "e.png", "x/e.png")
    # two row groups in one file, one in the other
    rows = [{"image": {"bytes": content, "path": None}, "label": 0} for content in contents]
    table = pa.Table.from_pylist([*rows, {"image": None, "label": 0}])
    (tmp_path / "tables").mkdir()
    for name, count in (("train-0", 4), ("train-1", 1)):
        pq.write_table(table[:count], tmp_path / "tables" / f"{name}.parquet", row_group_size=2)
    named = table.append_column("path", pa.array(["x", None, "z", "z"]))
    pq.write_table(named, tmp_path / "named.parquet")
    paths = pa.table({"path": ["photos/b.png", None]})
    pq.write_table(paths, tmp_path / "paths.parquet")
    names = ("photos", "list.csv", "s.tar", "tables", "named.parquet", "paths.parquet", "gone")
    places = [*(str(tmp_path / name) for name in names), "digits"]

    listed = list_files(places)
    found = read_all(listed)
    expected = {printable(name): _decode(name, image) for name, image in list_inputs(places)}
    assert found == expected
    assert [name for name in found if "photos" in name] == [
        *(f"{photos}/{name}" for name in ("a.png", "b.png", "c/d.png", "e.png", "f\ufffd.png")),
        f"{photos}/gone.png",
    ]
    packed = ("s.tar", "tables/train-0.parquet", "tables/train-1.parquet", "named.parquet")
    assert list(listed[1]) == [*(str(tmp_path / name) for name in packed), "digits"]
    # a job that goes on leaves out the rows of what is packed
    left = read_all(listed, ("s.tar/x/a", "z", f"{tmp_path}/tables/train-0.parquet/00003"))
    assert found.keys() - left.keys() == {
        "s.tar/x/a",
        "z",
        f"{tmp_path}/tables/train-0.parquet/00003",
    }
    with pytest.raises(ValueError, match="2 of them are called z; leave out --resume"):
        check_names(listed)
    check_names(list_files([str(tmp_path / "tables"), str(tmp_path / "s.tar"), str(photos)]))
    shutil.copy(tmp_path / "s.tar", photos)
    with pytest.raises(ValueError, match=r"2 of them are called s\.tar"):
        check_names(list_files([str(tmp_path / "s.tar"), str(photos / "s.tar")]))


def test_without_its_package_one_sentence_says_what_to_install(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "vit.deploy.batch.engine", raising=False)
    command = ("predict", tiny_model_file, os.curdir, "--engine", "ray", "--output", tmp_path)
    assert "--engine ray needs Ray: pip install '.[ray]'" in cli.fail(*command)
