"""Which configuration a run has: a file, a packaged recipe, a dictionary, a `Config`, or one chosen for the images."""

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import vit
from vit.config import Config, load_config, plain_values, read_overrides
from vit.runtime.arguments import shorten
from vit.runtime.files import read_text
from vit.training.identity import find_changes
from vit.training.run_directory import CONFIG_FILE

if TYPE_CHECKING:
    from vit.data.open import ImageDataset

ConfigLike = str | Path | Mapping[str, Any] | Config


class Chosen(NamedTuple):
    """A configuration; where it was chosen for images, what was chosen and why, by name, and their open data set."""

    config: Config
    choices: Mapping[str, str]
    dataset: "ImageDataset | None"


def prepare_config(
    config: ConfigLike | None,
    overrides: Sequence[str],
    output: Path,
    *,
    resume: bool,
    init: str | Path | None = None,
    minutes: float | None = None,
) -> tuple[str, Callable[[], Chosen]]:
    """The device of the run in the directory `output`, and what gives its configuration: where `config` names images,
    that is chosen for them, which takes seconds on that device. Raises as `resolve_config` does."""
    if init is not None:
        overrides = [f"model.init={_find_weights(init, output)}", *overrides]
    is_chosen = isinstance(config, str | Path) and not is_recipe(config)
    if not is_chosen and minutes is not None:
        raise ValueError("--minutes is for a configuration that is chosen for images; others have train.epochs")
    if not is_chosen or (resume and (output / CONFIG_FILE).exists()):
        resolved = resolve_config(None if is_chosen else config, overrides, output, resume=resume)
        return resolved.train.device, lambda: Chosen(resolved, {}, None)
    assert isinstance(config, str | Path)
    if any(text.endswith("=given") for text in overrides):
        raise ValueError("a configuration is chosen for images and models that are named; give one, such as a recipe's")
    from vit.build.automatic import choose_config

    device = str(read_overrides(overrides).get("train", {}).get("device", "auto"))
    return device, partial(choose_config, config, overrides, minutes=minutes)


def resolve_config(config: ConfigLike | None, overrides: Sequence[str], output: Path, *, resume: bool) -> Config:
    """The configuration of the run in the directory `output`; its own where it is to be continued. Raises ValueError
    where there is none, where it is wrong, and where it differs from the run to be continued."""
    saved = output / CONFIG_FILE
    continues = resume and saved.exists()
    if config is None and not continues:
        raise ValueError("which configuration? vit train PHOTOS or CONFIG [key.path=value …] --output DIR")
    source = plain_values(config) if isinstance(config, Config) else saved if config is None else config
    resolved = load_config(find_recipe(source) if isinstance(source, str | Path) else source, overrides)
    root, is_given = resolved.data.root or "", any(text.startswith("data.root=") for text in overrides)
    if isinstance(source, str | Path) and "pipe:" in root and not is_given:
        cure = f"if you trust it, add {'data.root=' + shorten(root)!r} to the command"
        raise ValueError(f"{source} would start a program for its images; {cure}")
    if continues and (changed := find_changes(resolved, saved)):
        text, cure = f"--resume continues the run of {saved}, but {', '.join(changed)} differ", "resume without them"
        if changed == ["train.epochs"]:
            is_longer = resolved.train.epochs > load_config(saved).train.epochs
            if is_longer and resolved.schedule.name == "constant-cooldown":
                return resolved
            cure = "only a schedule constant-cooldown goes on to more epochs"
        raise ValueError(f"{text}; {cure} or start another run, perhaps from its model with --init {output}")
    return resolved


def is_recipe(name: str | Path) -> bool:
    """Whether this is a packaged recipe or a YAML file, or what is neither and no images: to be named in an error."""
    path, folder = Path(name), _recipe_folder()
    if path.suffix in (".yaml", ".yml") or (folder / f"{name}.yaml").is_file():
        return True
    from vit.data.open import find_kind

    return find_kind(name) is None


def find_recipe(name: str | Path) -> Path:
    """The configuration file `name`, or the packaged recipe of that name, such as "cifar10/cpu". Raises
    FileNotFoundError with the recipes' names where it is neither."""
    path, folder = Path(name), _recipe_folder()
    if path.is_file() or path.suffix in (".yaml", ".yml") or not folder.is_dir():
        return path
    recipe = folder / f"{name}.yaml"
    if not recipe.is_file():
        known = f"packaged recipes: {', '.join(list_recipes())}"
        raise FileNotFoundError(f"configuration {name} does not exist; {known}; or name a folder of images")
    return recipe


def list_recipes() -> dict[str, dict[str, str]]:
    """Name → task, accuracy and time of the packaged recipes, from the comment that each begins with."""
    folder, found = _recipe_folder(), {}
    for path in sorted(folder.rglob("*.yaml")):
        comment = " ".join(line[2:] for line in read_text(path).splitlines() if line.startswith("# "))
        accuracy = re.search(r"([\d.]+(?: ± [\d.]+)? %) test top-1", comment)
        time = re.search(r"(\d+ s to \d+ s|\d+ s)\b", comment)
        cells = {"task": re.split(r"[.:] ", comment)[0], "accuracy": accuracy[1] if accuracy else "not measured"}
        found[str(path.relative_to(folder).with_suffix(""))] = cells | {"time": time[1] if time else ""}
    return found


def _recipe_folder() -> Path:
    packaged = Path(vit.__file__).parent / "configs"
    return packaged if packaged.is_dir() else packaged.parents[1] / "configs"  # of a checkout


def _find_weights(init: str | Path, output: Path) -> str:
    """`model.init` for what a user names: the model file of a run directory, found from anywhere."""
    from vit.model.model_file import MODEL_FILE  # torch takes seconds, and vit recipes needs none

    path = Path(init).expanduser()
    if str(init).startswith("timm:"):
        return str(init)
    if path.is_dir() and not (path / "config.json").is_file():  # a folder of timm's has that one
        path /= MODEL_FILE
    if not path.exists():
        raise FileNotFoundError(f"--init {init} is no timm:NAME, and there is no {path}")
    if path.resolve().parent == output.resolve():
        raise ValueError(f"--init {init} is the run in --output; choose another --output")
    return str(path.absolute())
