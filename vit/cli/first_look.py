"""Check the paths of a command before torch is imported, which takes seconds."""

import os
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from vit.runtime.patterns import check_pattern
from vit.runtime.places import explain_file, suggest


def check_paths(values: Mapping[str, Any]) -> None:
    """Raise the error that a path among the values of a command's parameters would raise later.

    Raises:
        ValueError, OSError: See the public functions.
    """
    for name, check in _CHECKS.items():
        if values.get(name) is not None:
            check(values[name])


def _check_model(model: str | Sequence[str]) -> None:
    from vit.data.images import is_image_name
    from vit.model.find_file import find_model_file, is_timm_folder

    if not isinstance(model, str):
        for each in model:
            _check_model(each)
        return
    if model.startswith("timm:") or is_timm_folder(model):
        return
    if is_image_name(str(find_model_file(model))):
        raise ValueError(f"{model} is an image, not a model; the model comes before the images")


def _check_init(init: str) -> None:
    from vit.model.find_file import find_initial_weights

    find_initial_weights(init)


def _check_data(data: str) -> None:
    from vit.data.open import check_place

    check_place(data)


def _check_images(images: str | Sequence[str]) -> None:
    """Raise the error of the first path if no path can be an image, and of a folder without images
    that is named alone."""
    from vit.data.inputs import is_input, list_inputs

    paths = [images] if isinstance(images, str) else images
    if len(paths) == 1 and os.path.isdir(paths[0]):
        next(list_inputs(paths[0]), None)
    if not any(
        path == "-" or (not explain_file(path) if os.path.lexists(path) else is_input(path))
        for path in paths
    ):
        _check_exists(paths[0])
        raise ValueError(explain_file(paths[0]))


def _check_pattern(pattern: str, *, name: str) -> None:
    # a number is the level of a folder
    if not pattern.isdecimal():
        check_pattern(pattern, name=name)


def _check_exists(*paths: str | Path) -> None:
    for path in paths:
        if not os.path.lexists(path):
            raise FileNotFoundError(f"{path} does not exist{suggest(path)}")


_CHECKS: Mapping[str, Callable[[Any], None]] = {
    "model": _check_model,
    "init": _check_init,
    "data": _check_data,
    "images": _check_images,
    "group_by": partial(_check_pattern, name="--group-by"),
    "label_by": partial(_check_pattern, name="--label-by"),
    "evaluations": lambda paths: _check_exists(*paths),
}
