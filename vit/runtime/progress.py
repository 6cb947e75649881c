"""Show a progress bar on standard error."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol


class Advance(Protocol):
    """Move the bar by `count` items, and change its title if one is passed."""

    def __call__(self, count: float, title: str | None = None) -> None: ...


@contextmanager
def show_progress(title: str, total: int | None, *, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar. Text printed to standard error meanwhile appears above it.

    Args:
        title: Text before the bar.
        total: Number of items. None: unknown.
        shown: False hides the bar. It is also hidden if standard error is not a terminal.

    Yields:
        A function that advances the bar.
    """
    # rich takes longer to import than `vit --help` may take
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeRemainingColumn(),
    )
    # A log file must not get control characters.
    is_hidden = not (shown and console.is_terminal)
    with progress.Progress(*columns, console=console, disable=is_hidden, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count, title=None: bar.update(task, advance=count, description=title)
