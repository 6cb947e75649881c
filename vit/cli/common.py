"""What the commands share: the options that several of them have, and how facts are shown."""

import sys
from collections.abc import Iterable, Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from vit.runtime.arguments import printable

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

Model = Annotated[str, typer.Argument(help="model.safetensors, a training directory or timm:NAME")]
OptionalModel = Annotated[str | None, typer.Argument(help="model.safetensors, a training directory or timm:NAME")]
Output = Annotated[Path, typer.Option("--output", "-o", help="directory for the results")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="replace an earlier result")]
Data = Annotated[str | None, typer.Option(help="a data set, folder or shards; default: what the model was trained on")]
Root = Annotated[Path | None, typer.Option(help="where that data set is")]
Split = Annotated[str | None, typer.Option(help="train, validation, test or all; default: test, or all if it has none")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or cuda:N")]
Batch = Annotated[int | None, typer.Option(min=1, help="images at a time; default 64 up to 64 pixels a side, else 16")]
Precision = Annotated[str, typer.Option(help="auto, float32 or bfloat16")]
RandomWeights = Annotated[bool, typer.Option("--random-weights", help="the same model untrained: a sanity check")]


def build_console(*, stderr: bool = False) -> "Console":
    """A console that prints text as it is: names of files and classes may look like markup."""
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, markup=False, emoji=False)


def build_facts_table(facts: Mapping[str, object]) -> "Table":
    """Names and values in two columns."""
    from rich.table import Table
    from rich.text import Text

    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in facts.items():
        table.add_row(Text(printable(name), style="bold"), Text(printable(str(value))))
    return table


def list_names(names: Iterable[str]) -> Iterator[str]:
    """`names`, and in the place of - the lines of standard input; file names of any bytes pass through."""
    if isinstance(sys.stdin, TextIOWrapper):
        sys.stdin.reconfigure(errors="surrogateescape")
    for name in names:
        yield from (line.rstrip("\r\n") for line in sys.stdin if line.strip()) if name == "-" else [name]
