"""`vit recipes`: the packaged configurations, and what they are for."""

from vit.runtime.command import Command
from vit.runtime.console import build_console, build_table


def recipes() -> None:
    """List the recipes that vit train NAME takes."""
    # yaml and pydantic, which `vit --help` does without
    from vit.training.recipe import list_recipes

    table = build_table(list_recipes().items(), ("name", "task"), num_text_columns=2)
    # A name must not be broken: users copy it into the next command.
    table.columns[0].no_wrap = True
    build_console().print(table)


COMMAND = Command(run=recipes)
