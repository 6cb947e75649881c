"""Show the progress of long work: a bar in a terminal, lines in a log."""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from vit.runtime.arguments import replace_control_characters

# The command line writes it to standard error. From Python it is silent unless a program sets it
# up.
LOGGER = logging.getLogger("vit")
# Seconds before the first line in a log, and between lines.
FIRST_LINE = 5.0
_NEXT_LINES = 60.0


class Advance(Protocol):
    """Move the bar by `count` items, and change its title if one is passed."""

    def __call__(self, count: float, title: str | None = None) -> None: ...


@contextmanager
def show_progress(
    title: str, total: int | None = None, *, shown: bool = True, lines: bool = True
) -> Iterator[Advance]:
    """Show a progress bar on standard error if that is a terminal. Text printed to standard error
    meanwhile appears above it. Otherwise log a line when the work has taken 5 seconds, then one
    every minute.

    Args:
        title: Text before the bar.
        total: Number of items. None: unknown, or the work has no items.
        shown: False hides all of it.
        lines: False: no lines in a log, because the work has its own.

    Yields:
        A function that advances the bar.
    """
    # rich takes longer to import than `vit --help` may take
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    if shown and lines and not console.is_terminal and LOGGER.isEnabledFor(logging.INFO):
        with _log_lines(title, total) as advance:
            yield advance
        return
    columns: list[progress.ProgressColumn] = [
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
    ]
    if total is not None:
        columns += [progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
    # A log file must not get control characters.
    is_hidden = not (shown and console.is_terminal)
    with progress.Progress(*columns, console=console, disable=is_hidden, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count, title=None: bar.update(task, advance=count, description=title)


@contextmanager
def _log_lines(title: str, total: int | None) -> Iterator[Advance]:
    done = 0.0
    ended = threading.Event()
    started = time.monotonic()

    def advance(count: float, title: str | None = None) -> None:
        nonlocal done
        done += count

    def write_lines() -> None:
        wait = FIRST_LINE
        while not ended.wait(wait):
            parts = [f"{done:,.0f}"] if done else []
            if total is not None:
                parts = [f"{done:,.0f} of {total:,}"]
            parts.append(f"{time.monotonic() - started:.0f} s")
            text = replace_control_characters(f"{title}: {', '.join(parts)}")
            # not `info`, which the export silences with the messages of its libraries
            LOGGER.handle(LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, text, (), None))
            wait = _NEXT_LINES

    # a thread, because one item may take long
    thread = threading.Thread(target=write_lines, name="progress", daemon=True)
    thread.start()
    try:
        yield advance
    finally:
        ended.set()
        thread.join()
