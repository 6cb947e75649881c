"""`vit recipes`: the packaged configurations, and what they measured."""

from vit.cli.common import build_console


def recipes() -> None:
    """List the recipes that `vit train NAME` takes, with the accuracy on the test images and the time they took."""
    from rich.table import Table

    from vit.build.recipe import list_recipes

    table = Table("name", "task", "test top-1", "time", box=None, padding=(0, 2, 0, 0))
    for name, facts in list_recipes().items():
        table.add_row(name, *facts.values())
    build_console().print(table)
