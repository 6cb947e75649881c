"""Files that are written while the work goes on."""

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class BackgroundWriter:
    """One thread that writes files, in the order in which they were submitted.

    After one that fails, nothing more is written: what comes behind may rest on it, as a checkpoint
    does on the model file of its best step. Its error is raised by the next call of any method.
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(1, "vit-writer")
        self._last: Future[None] | None = None
        self._error: BaseException | None = None

    def submit(self, write: Callable[[], object]) -> Future[None]:
        """Have `write` called in the thread; it shares nothing with the caller that changes.

        Returns:
            What is done when `write` has returned.
        """
        self.check()
        self._last = self._executor.submit(self._run, write)
        return self._last

    def check(self) -> None:
        """Raise the error of a file that could not be written, without waiting."""
        if self._error is not None:
            raise self._error

    def wait(self) -> None:
        """Return when all that was submitted is on disk."""
        self.finish()
        self.check()

    def finish(self) -> None:
        """As `wait`, without its error: for a work that ends with another one."""
        if self._last is not None:
            self._last.result()

    def _run(self, write: Callable[[], object]) -> None:
        if self._error is not None:
            return
        try:
            write()
        except BaseException as error:
            self._error = error
