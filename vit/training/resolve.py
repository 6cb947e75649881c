"""From the arguments of `vit.train` to its configuration."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from vit.config import Config, load_config, plain_values, read_sections, validate_config
from vit.data.dataset import LabelRule
from vit.data.sources.folders import check_not_inside
from vit.data.sources.python_objects import FROM_PYTHON
from vit.model.find_file import find_initial_weights
from vit.runtime.files import expand_home
from vit.training.recipe import ConfigLike, find_recipe, names_images
from vit.training.run_directory import CONFIG_FILE

# Keys that `--folds` sets: a linear probe is fitted on all images.
FOLDS_OVERRIDES = (
    "data.validation_fraction=0",
    "data.test_fraction=0",
    "model.probe=true",
    "model.freeze=backbone",
)


def resolve_arguments(
    source: ConfigLike | None,
    *,
    output: str | Path,
    overrides: Sequence[str],
    init: str | Path | None,
    minutes: float | None,
    group_by: str | int | None,
    labels: LabelRule,
    folds: int | None,
    resume: bool,
    overwrite: bool,
    passed: Sequence[str] = (),
) -> tuple[Path, list[str], Config | None]:
    """Resolve the arguments of `vit.train`, which are described there.

    Returns:
        The directory of the run, all overrides, and the configuration; None for images, for which
        one is to be chosen.

    Raises:
        ValueError, OSError: There is no configuration, it is wrong, or these arguments don't fit
            together. See `vit.train`.
    """
    if resume and overwrite:
        raise ValueError("--resume continues a run and --overwrite replaces it; give one of them")
    directory = expand_home(output)

    # These arguments stand for keys of the configuration.
    listed: list[str] = []
    if folds is not None:
        listed += FOLDS_OVERRIDES
    if group_by is not None:
        # As JSON, so that an expression that is a number by chance stays a text.
        text = str(group_by)
        listed.append(f"data.group_by={text if text.isdecimal() else json.dumps(text)}")
    for name, value in labels._asdict().items():
        if value is not None:
            listed.append(f"data.{name}={json.dumps(value)}")
    if init is not None:
        listed.append(f"model.init={json.dumps(find_initial_weights(init, directory))}")
    listed += overrides

    saved = directory / CONFIG_FILE
    continues = resume and saved.exists()
    has_images = names_images(source)
    if minutes is not None and not has_images:
        raise ValueError(
            "--minutes is for a configuration that is chosen for images; others have train.epochs"
        )
    if has_images and not continues:
        assert isinstance(source, str | Path)
        if passed:
            raise ValueError(
                "a configuration is chosen for images and models that are named; "
                "name a recipe to pass them from Python"
            )
        check_not_inside(directory, expand_home(source))
        return directory, listed, None
    if source is None and not continues:
        usage = "vit train PHOTOS or CONFIG [key.path=value …] --output DIR"
        raise ValueError(f"which configuration? {usage}")

    if source is None or has_images:
        source = saved
    elif isinstance(source, Config):
        source = plain_values(source)
    elif not isinstance(source, Mapping):
        source = find_recipe(source)
    sections = read_sections(source, listed)
    # The file of the configuration must not name images or weights that are not used.
    if "dataset" in passed:
        sections.setdefault("data", {}).update(name=FROM_PYTHON, root=None, classes=None)
    if "model" in passed:
        sections.setdefault("model", {})["init"] = FROM_PYTHON
    config = validate_config(sections)
    # The pipeline that was chosen at the start holds, whatever memory is free now.
    if continues and config.data.pipeline == "auto":
        config = config.with_data(pipeline=load_config(saved).data.pipeline)
    # In its folder of images, the directory would spoil the images for each later run.
    if config.data.name == "folder" and config.data.root is not None:
        check_not_inside(directory, expand_home(config.data.root))
    return directory, listed, config
