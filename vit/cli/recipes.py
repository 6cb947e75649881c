"""`vit recipes`: the packaged configurations, and what they measured."""

from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table


def recipes() -> None:
    """List the recipes that vit train NAME takes."""
    # yaml and pydantic, which `vit --help` does without
    from vit.training.recipe import list_recipes

    rows = [(name, *recipe) for name, recipe in list_recipes().items()]
    headings = ("name", "task", "test top-1", "time")
    table = build_table(rows, headings, num_text_columns=4)
    # A name must not be broken: users copy it into the next command.
    table.columns[0].no_wrap = True
    build_console().print(table)


COMMAND = Command(run=recipes)
