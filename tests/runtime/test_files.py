"""A written file is the old one or the new one; an output directory loses nothing of others."""

import os
from pathlib import Path

import pytest

from vit.runtime.files import open_output, rename_durably, write_atomically


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_only_results_of_vit_are_replaced_and_only_when_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = open_output(tmp_path / "out")
    (output / "maps").mkdir()
    (output / "maps" / "a.txt").write_text("old")
    with pytest.raises(FileExistsError, match="add --overwrite"):
        open_output(output)
    assert (output / "maps" / "a.txt").read_text() == "old"

    # neither a link nor a mounted volume can be replaced; its files can
    (tmp_path / "link").symlink_to(output)
    open_output(tmp_path / "link", overwrite=True)
    assert [entry.name for entry in output.iterdir()] == [".vit-output"]
    monkeypatch.chdir(output)
    open_output(".", sources=["timm:vit"])

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "note.txt").touch()
    with pytest.raises(FileExistsError, match="replaces a result of vit"):
        open_output(tmp_path / "theirs", overwrite=True)
    with pytest.raises(NotADirectoryError):
        open_output(tmp_path / "theirs" / "note.txt", overwrite=True)


def test_a_folder_gets_its_name_when_all_of_its_files_are_on_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "folder.building"
    folder.mkdir()
    names = ["folder.building", *("a.npy", "b.npz")]
    paths = [folder, folder / "a.npy", folder / "b.npz"]
    for path in paths[1:]:
        path.write_text(path.name)
    inodes = {path.stat().st_ino: name for path, name in zip(paths, names, strict=True)}
    inodes[tmp_path.stat().st_ino] = "parent"
    flushed: list[str] = []

    def note(descriptor: int) -> None:
        is_renamed = (tmp_path / "folder").exists()
        flushed.append(inodes[os.fstat(descriptor).st_ino] + " after" * is_renamed)

    monkeypatch.setattr(os, "fsync", note)
    rename_durably(folder, tmp_path / "folder")
    assert sorted(flushed[:3]) == sorted(names)
    assert flushed[3:] == ["parent after"]


def test_two_writers_do_not_meet(tmp_path: Path) -> None:
    path = tmp_path / "file"

    def write(temporary: Path) -> None:
        temporary.write_text("outer")
        write_atomically(path, "inner")

    write_atomically(path, write)
    assert path.read_text() == "outer"
