"""From the arguments of `vit.train` to its configuration."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from vit.config import Config, Overrides, load_config, read_sections
from vit.data.sources.folders import check_not_inside
from vit.data.sources.python_objects import FROM_PYTHON
from vit.runtime.files import expand_home
from vit.training.recipe import ConfigLike, find_recipe, names_images
from vit.training.run_directory import CONFIG_FILE


def resolve_config(
    source: ConfigLike | None,
    directory: Path,
    overrides: Overrides,
    *,
    resume: bool,
    passed: Sequence[str] = (),
) -> Config | None:
    """Find the configuration of a run in `directory`. None for images, for which one is to be
    chosen. Raises ValueError or OSError if there is none, or it is wrong.

    Args:
        source, resume: See `config` and `resume` of `vit.train`.
        passed: Names of the arguments that bring images or a model from Python.
    """
    saved = directory / CONFIG_FILE
    continues = resume and saved.exists()
    is_images = names_images(source)
    if continues and (is_images or source is None):
        source = saved
    elif is_images:
        assert isinstance(source, str | Path)
        if passed:
            raise ValueError(
                "a configuration is chosen for images and models that are named; name a recipe to"
                " pass them from Python"
            )
        check_not_inside(directory, expand_home(source))
        return None
    elif source is None:
        usage = "vit train PHOTOS or CONFIG [key.path=value …] --output DIR"
        raise ValueError(f"which configuration? {usage}")
    elif isinstance(source, Config):
        source = source.model_dump(exclude_unset=True)
    elif not isinstance(source, Mapping):
        source = find_recipe(source)
    sections = read_sections(source, overrides)
    # The file of the configuration must not name images or weights that are not used.
    if "dataset" in passed:
        sections.setdefault("data", {}).update(name=FROM_PYTHON, root=None, classes=None)
    if "model" in passed:
        sections.setdefault("model", {})["init"] = FROM_PYTHON
    config = load_config(sections)
    # The pipeline that was chosen at the start holds, whatever memory is free now.
    if continues and config.data.pipeline == "auto":
        config = config.with_data(pipeline=load_config(saved).data.pipeline)
    # In its folder of images, the directory would spoil the images for each later run.
    if config.data.name == "folder" and config.data.root is not None:
        check_not_inside(directory, expand_home(config.data.root))
    return config
