"""Text and tables on the terminal, without the control characters that names may hold."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import typer

from vit.runtime.arguments import replace_control_characters

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text


def echo(text: str, *, err: bool = False, color: str | None = None) -> None:
    """Print text on standard output or, with `err`, on standard error."""
    typer.secho(replace_control_characters(text), err=err, fg=color)


def build_console(*, stderr: bool = False) -> "Console":
    """Build a console that prints text unchanged: names of files may look like markup."""
    # rich takes longer to import than `vit --help` may take
    from rich.console import Console

    class PlainConsole(Console):
        # also called for the cells of a table
        def render_str(self, text: str, **options: Any) -> "Text":
            return super().render_str(replace_control_characters(text), **options)

    return PlainConsole(stderr=stderr, highlight=False, markup=False, emoji=False)


def build_table(
    rows: Iterable[Sequence[object]],
    headings: Sequence[str] = ("", ""),
    *,
    title: str | None = None,
    num_text_columns: int = 1,
) -> "Table":
    """Build a table whose first columns are text and whose other columns are numbers."""
    from rich.table import Table

    table = Table(title=title, show_header=any(headings), box=None, padding=(0, 2, 0, 0))
    for number, heading in enumerate(headings):
        is_text = number < num_text_columns
        table.add_column(heading, justify="left" if is_text else "right", overflow="fold")
    for row in rows:
        table.add_row(*map(str, row))
    return table
