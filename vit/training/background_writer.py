"""Write files while the program goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """One thread that writes files, in the order in which they were submitted.

    After a file that fails, nothing more is written, because later files may need it: a checkpoint
    needs the model file of its best step. `submit`, `check` and `wait` raise its error.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "vit-writer")
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], object]) -> Future[None]:
        """Call `write` in the thread, and return a future that is done when it has returned. The
        caller must not change what `write` uses."""
        self.check()
        return self._executor.submit(self._run, write)

    def check(self) -> None:
        """Raise the error of a file that could not be written. Does not wait."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Wait until all submitted files are on disk."""
        self.finish()
        self.check()

    def finish(self) -> None:
        """Wait, and raise nothing: for a run that ends with an error of its own."""
        # The thread takes one task after another.
        self._executor.submit(int).result()

    def _run(self, write: Callable[[], object]) -> None:
        try:
            if self._error is None:
                write()
        except BaseException as error:
            self._error = error
