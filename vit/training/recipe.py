"""The packaged recipes, which `vit recipes` lists without torch or numpy."""

import re
from collections.abc import Mapping
from pathlib import Path

import vit  # its folder holds the recipes
from vit.config import Config
from vit.runtime.files import read_text
from vit.runtime.places import explain_file, suggest

# The configuration of a run: a YAML file, the name of a packaged recipe, sections, or a `Config`.
ConfigLike = str | Path | Mapping[str, object] | Config


def names_images(source: ConfigLike | None) -> bool:
    """Return whether a user named images, for which a configuration is to be chosen. Raises
    ValueError if it is an archive or a document."""
    if not isinstance(source, str | Path):
        return False
    is_yaml = Path(source).suffix in (".yaml", ".yml")
    if is_yaml or (_recipe_folder() / f"{source}.yaml").is_file():
        return False
    if problem := explain_file(source):
        raise ValueError(problem)
    # numpy and Pillow, which `vit recipes` doesn't need
    from vit.data.open import find_kind

    return find_kind(source) is not None


def find_recipe(name: str | Path) -> Path:
    """Return the YAML file `name`, or the packaged recipe of that name, such as "cifar10/cpu".
    Raises FileNotFoundError, which lists the recipes, if there is neither."""
    path = Path(name)
    if path.suffix in (".yaml", ".yml"):
        return path
    recipe = _recipe_folder() / f"{name}.yaml"
    if not recipe.is_file():
        hint = f"; packaged recipes: {', '.join(list_recipes())}"
        if not path.exists():
            hint = suggest(name, list_recipes()) + hint
        raise FileNotFoundError(
            f"{name} is no configuration (.yaml), table (.csv) or folder of images{hint}"
        )
    return recipe


def list_recipes() -> dict[str, str]:
    """Return the first sentence of each packaged recipe, by name."""
    folder = _recipe_folder()
    recipes = {}
    for path in sorted(folder.rglob("*.yaml")):
        name = path.relative_to(folder).with_suffix("").as_posix()
        comment = " ".join(re.findall("^# (.*)", read_text(path), flags=re.MULTILINE))
        recipes[name] = re.split(r"[.:] ", comment)[0]
    return recipes


def _recipe_folder() -> Path:
    packaged = Path(vit.__file__).parent / "configs"
    if packaged.is_dir():
        return packaged
    return packaged.parents[1] / "configs"  # in a checkout
