"""Parts are written whole, each image has one row, and a job goes on where another one ended."""

import os
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from tests.conftest import Launcher
from vit.data.inputs import list_inputs
from vit.deploy.batch.inputs import list_files, read_contents
from vit.deploy.batch.parts import Parts

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


def test_files_and_rows_are_listed_and_read(tmp_path: Path) -> None:
    for name in ("b.png", "a.png", "notes.txt", "c/d.png"):
        path = tmp_path / "photos" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (2, 2), "red").save(path, "PNG")
    files = [str(tmp_path / "photos" / name) for name in ("a.png", "b.png", "c/d.png")]
    listed = list_files([str(tmp_path / "photos"), files[0], "gone.png"])
    assert listed["path"].to_pylist() == [*files, "gone.png"]
    contents = [Path(file).read_bytes() for file in files]
    assert read_contents(listed)["bytes"].to_pylist() == [*contents, None]

    # two row groups in one file, one in the other
    rows = [{"image": {"bytes": content, "path": None}, "label": 0} for content in contents]
    table = pa.Table.from_pylist(rows)
    (tmp_path / "tables").mkdir()
    for name, count in (("train-0", 3), ("train-1", 1)):
        pq.write_table(table[:count], tmp_path / "tables" / f"{name}.parquet", row_group_size=2)
    listed = list_files([str(tmp_path / "tables")])
    assert listed["path"].to_pylist() == [
        *(f"{tmp_path}/tables/train-0.parquet/{number:05d}" for number in range(3)),
        f"{tmp_path}/tables/train-1.parquet/00000",
    ]
    # the images that are left when some have a row
    read = read_contents(listed.take([1, 2, 3]))
    assert read["path"].to_pylist() == listed["path"].to_pylist()[1:]
    assert read["bytes"].to_pylist() == [contents[1], contents[2], contents[0]]
    with pytest.raises(ValueError, match="start two jobs"):
        list_files([files[0], str(tmp_path / "tables")])
    # a column of names
    names = table.append_column("path", pa.array(["x", None, "z"]))
    pq.write_table(names, tmp_path / "named.parquet")
    listed = list_files([str(tmp_path / "named.parquet")])
    assert listed["path"].to_pylist() == ["x", f"{tmp_path}/named.parquet/00001", "z"]
    # the same names as one process gives them
    for place in (tmp_path / "tables", tmp_path / "named.parquet", tmp_path / "photos"):
        assert [name for name, _ in list_inputs([str(place)])] == (
            list_files([str(place)])["path"].to_pylist()
        )
    with pytest.raises(ValueError, match="and digits is none of these"):
        list_files(["digits"])


def test_without_its_package_one_sentence_says_what_to_install(
    cli: Launcher, tiny_model_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.delitem(sys.modules, "vit.deploy.batch.engine", raising=False)
    command = ("predict", tiny_model_file, os.curdir, "--engine", "ray", "--output", tmp_path)
    assert "--engine ray needs Ray: pip install '.[ray]'" in cli.fail(*command)
