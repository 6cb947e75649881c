"""A written file is the old one or the new one; an output directory loses nothing of others."""

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from vit.runtime.files import open_output, write_atomically, write_text


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError("disk full"), "disk full"),
        # safetensors has an error of its own
        (SafetensorError("I/O error: full (os error 28)"), "No space left on device"),
    ],
)
def test_a_failing_writer_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: Exception, message: str
) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise error

    with pytest.raises(OSError, match=message) as caught:
        write_atomically(path, fail)
    assert caught.value.errno in (None, errno.ENOSPC)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_library_that_makes_the_file_anew_does_not_change_its_mode(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.unlink()
        temporary.touch(mode=0o600)

    write_atomically(tmp_path / "ours", write)
    (tmp_path / "other").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_only_results_of_vit_are_replaced_and_only_when_told(tmp_path: Path) -> None:
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
    open_output(output)

    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "note.txt").touch()
    with pytest.raises(FileExistsError, match="vit did not make"):
        open_output(tmp_path / "theirs", overwrite=True)
    with pytest.raises(NotADirectoryError):
        open_output(tmp_path / "theirs" / "note.txt", overwrite=True)
