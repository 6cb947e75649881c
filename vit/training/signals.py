"""Stopping a run from outside."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class TrainingInterrupted(Exception):
    """The run was asked to stop and has saved its state; it can be continued."""


@contextmanager
def stop_on_signals(request_stop: Callable[[str], None]) -> Iterator[None]:
    """Call `request_stop` with the name of the first SIGINT or SIGTERM; a second one ends the
    process at once. In another thread than the main one, which receives no signals, they are left
    alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: object) -> None:
        for kind in _SIGNALS:
            signal.signal(kind, signal.SIG_DFL)
        request_stop(signal.Signals(number).name)

    previous = {kind: signal.signal(kind, handle) for kind in _SIGNALS}
    try:
        yield
    finally:
        for kind, handler in previous.items():
            signal.signal(kind, handler)
