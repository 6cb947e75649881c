"""The one progress bar, on standard error."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def show_progress(title: str, total: int | None, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar for `total` items (None: unknown), hidden where standard error is no terminal; yields what advances it."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(
        *columns, console=console, disable=not (shown and console.is_terminal), transient=True
    ) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count: bar.advance(task, count)
