"""Show the progress of long work in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager

# Moves the bar by a number of items, and changes its title if one is passed.
Advance = Callable[..., None]


@contextmanager
def show_progress(title: str, total: int | None = None, *, shown: bool = True) -> Iterator[Advance]:
    """Show a progress bar on standard error if that is a terminal and `shown` is set, and yield a
    function that advances it. Without a `total` of items it shows that the work goes on. Text
    printed to standard error meanwhile appears above it."""
    # rich takes longer to import than `vit --help` may take
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    columns: list[str | progress.ProgressColumn] = ["{task.description}", progress.BarColumn()]
    if total is not None:
        columns += [progress.MofNCompleteColumn(), progress.TimeRemainingColumn()]
    # A log file must not get control characters.
    is_hidden = not (shown and console.is_terminal)
    with progress.Progress(*columns, console=console, disable=is_hidden, transient=True) as bar:
        task = bar.add_task(title, total=total)
        yield lambda count, title=None: bar.update(task, advance=count, description=title)
