"""Files are written in order, and none behind one that failed."""

import threading

import pytest

from vit.training.background_writer import BackgroundWriter


def test_the_caller_goes_on_and_files_are_written_in_order() -> None:
    writer = BackgroundWriter()
    may_write = threading.Event()
    written: list[int] = []
    first = writer.submit(lambda: may_write.wait(60))
    for number in range(5):
        writer.submit(lambda number=number: written.append(number))
    assert not first.done()
    assert written == []
    may_write.set()
    writer.wait()
    assert written == [0, 1, 2, 3, 4]


def test_nothing_is_written_behind_a_failure_which_every_later_call_raises() -> None:
    writer = BackgroundWriter()
    written: list[str] = []

    def fail() -> None:
        may_fail.wait(60)
        raise OSError("No space left on device")

    may_fail = threading.Event()
    writer.submit(fail)
    writer.submit(lambda: written.append("behind it"))
    writer.check()  # not yet
    may_fail.set()
    writer.finish()
    for call in (writer.check, writer.wait, lambda: writer.submit(lambda: None)):
        with pytest.raises(OSError, match="No space left"):
            call()
    assert written == []
