"""A file written atomically is the old one or the new one, whatever happens."""

import errno
from pathlib import Path

import pytest
from safetensors import SafetensorError

from vit.runtime.files import (
    compute_sha256,
    prepare_output,
    replace_output,
    write_atomically,
    write_text,
)


def test_a_failing_writer_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_written_file_is_readable_like_any_other(tmp_path: Path) -> None:
    write_text(tmp_path / "ours", "text")
    (tmp_path / "other").write_text("text")
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode
    assert compute_sha256(tmp_path / "ours") == compute_sha256(tmp_path / "other")


def test_a_library_that_makes_the_file_anew_does_not_change_its_mode(tmp_path: Path) -> None:
    def write(temporary: Path) -> None:
        temporary.unlink()
        temporary.touch(mode=0o600)

    write_atomically(tmp_path / "ours", write)
    (tmp_path / "other").touch()
    assert (tmp_path / "ours").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_earlier_result_stays_until_the_new_one_is_complete(tmp_path: Path) -> None:
    output = tmp_path / "out"
    with replace_output(output) as folder:
        (folder / "maps").mkdir()
        (folder / "maps" / "a.txt").write_text("old")

    def fail() -> None:
        with replace_output(output, overwrite=True) as folder:
            (folder / "b.txt").write_text("half")
            raise OSError("full")

    with pytest.raises(OSError, match="full"):
        fail()
    assert {path.name for path in output.iterdir()} == {".vit-output", "maps"}
    assert (output / "maps" / "a.txt").read_text() == "old"

    # a writer that was killed has left this
    (output / ".0123abcd.tmp").mkdir()
    with replace_output(output, overwrite=True) as folder:
        with (
            pytest.raises(ValueError, match="another process is writing into"),
            replace_output(output, overwrite=True),
        ):
            pass
        (folder / "b.txt").write_text("new")
    assert {path.name for path in output.iterdir()} == {".vit-output", "b.txt"}
    with pytest.raises(FileExistsError, match="--overwrite"), replace_output(output):
        pass

    # neither a link nor a mounted volume can be replaced; its files can
    (tmp_path / "link").symlink_to(output)
    with replace_output(tmp_path / "link", overwrite=True) as folder:
        (folder / "c.txt").touch()
    assert {path.name for path in output.iterdir()} == {".vit-output", "c.txt"}


def test_a_full_disk_is_an_os_error_for_weights_too(tmp_path: Path) -> None:
    def write(_: Path) -> None:
        raise SafetensorError("Error while serializing: I/O error: full (os error 28)")

    with pytest.raises(OSError, match="No space left on device") as error:
        write_atomically(tmp_path / "model.safetensors", write)
    assert error.value.errno == errno.ENOSPC
    assert not list(tmp_path.iterdir())


def test_what_a_killed_writer_left_is_cleared_and_nothing_else(tmp_path: Path) -> None:
    output = prepare_output(tmp_path / "out")
    (output / ".model.onnx.0123abcd.tmp").write_bytes(b"half")
    prepare_output(output)
    assert [path.name for path in output.iterdir()] == [".vit-output"]

    # with a complete file beside it, it is a result
    (output / ".model.onnx.0123abcd.tmp").write_bytes(b"half")
    (output / "model.json").write_text("{}")
    with pytest.raises(FileExistsError, match="add --overwrite"):
        prepare_output(output)

    # vit did not make this folder, so that its files are unknown
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / ".note.tmp").touch()
    with pytest.raises(FileExistsError):
        prepare_output(tmp_path / "theirs")
