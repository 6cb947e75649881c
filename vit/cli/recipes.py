"""`vit recipes`: the packaged configurations, and what they are for."""

from vit.runtime.command import Command
from vit.runtime.console import echo


def recipes() -> None:
    """List the recipes that vit train NAME takes."""
    # yaml and pydantic, which `vit --help` does without
    from vit.training.recipe import list_recipes

    found = list_recipes()
    width = max(map(len, found))
    for name, task in found.items():
        echo(f"{name:{width}}  {task}")


COMMAND = Command(run=recipes)
