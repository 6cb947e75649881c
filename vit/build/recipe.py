"""Which configuration a run has: a file, a packaged recipe, a dictionary or a `Config`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import vit
from vit.build.run import find_changes
from vit.config import Config, load_config, plain_values
from vit.runtime.arguments import shorten
from vit.training.run_directory import CONFIG_FILE

ConfigLike = str | Path | Mapping[str, Any] | Config


def resolve_config(config: ConfigLike | None, overrides: Sequence[str], output: Path, *, resume: bool) -> Config:
    """The configuration of the run in the directory `output`; its own where it is to be continued. Raises ValueError
    where there is none, where it is wrong, and where it differs from the run to be continued."""
    saved = output / CONFIG_FILE
    continues = resume and saved.exists()
    if config is None and not continues:
        raise ValueError("which configuration? vit train CONFIG.yaml [key.path=value …] --output DIR")
    source = plain_values(config) if isinstance(config, Config) else saved if config is None else config
    resolved = load_config(find_recipe(source) if isinstance(source, str | Path) else source, overrides)
    root, is_given = resolved.data.root or "", any(text.startswith("data.root=") for text in overrides)
    if isinstance(source, str | Path) and "pipe:" in root and not is_given:
        cure = f"if you trust it, add {'data.root=' + shorten(root)!r} to the command"
        raise ValueError(f"{source} would start a program for its images; {cure}")
    if continues and (changed := find_changes(resolved, saved)):
        text = f"--resume continues the run of {saved}, but {', '.join(changed)} differ"
        raise ValueError(f"{text}; resume without them or start another run")
    return resolved


def find_recipe(name: str | Path) -> Path:
    """The configuration file `name`, or the packaged recipe of that name, such as "cifar10/cpu". Raises
    FileNotFoundError with the recipes' names where it is neither."""
    path = Path(name)
    packaged = Path(vit.__file__).parent / "configs"
    folder = packaged if packaged.is_dir() else packaged.parents[1] / "configs"  # of a checkout
    if path.is_file() or path.suffix in (".yaml", ".yml") or not folder.is_dir():
        return path
    recipe = folder / f"{name}.yaml"
    if not recipe.is_file():
        known = sorted(str(found.relative_to(folder).with_suffix("")) for found in folder.rglob("*.yaml"))
        raise FileNotFoundError(f"configuration {name} does not exist; packaged recipes: {', '.join(known)}")
    return recipe
