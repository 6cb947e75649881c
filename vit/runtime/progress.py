"""The one progress bar, on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Moves the bar by `count` items and, where `title` is given, changes what stands before it."""

    def __call__(self, count: float, title: str | None = None) -> None: ...


@contextmanager
def show_progress(title: str, total: int | None, *, shown: bool = True, timed: bool = True) -> Iterator[Advance]:
    """A bar for `total` items (None: unknown), hidden where standard error is no terminal; yields what advances it.
    `timed`: with the time left, where items take what they took lately. What is printed to standard error meanwhile
    appears above the bar."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    columns = columns if timed else columns[:-1]
    with Progress(*columns, console=console, disable=not (shown and console.is_terminal), transient=True) as bar:
        task = bar.add_task(title, total=total)

        def advance(count: float, title: str | None = None) -> None:
            bar.update(task, advance=count, description=title)

        yield advance
