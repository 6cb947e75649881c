"""The one door to images: from a data set's name, a folder, a table or shards to its splits."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from vit.data.dataset import LABEL_FIELDS, ImageRule
from vit.data.sources import folders, huggingface, shards
from vit.data.sources.base import Listing, Root
from vit.data.sources.named import NAMED, find_named, find_own_name
from vit.data.sources.python_objects import FROM_PYTHON, find_python_objects
from vit.data.sources.tables import find_table
from vit.data.splits import DatasetSplits, number_listing
from vit.runtime.arguments import check_choice
from vit.runtime.files import expand_home
from vit.runtime.places import explain_file, suggest

# data.name of images at a place → function that is true for such a place, of which the first
# counts, and function that lists the images
PLACES: Mapping[str, tuple[Callable[[str], bool], Callable[[Path | str, ImageRule], Listing]]] = {
    "huggingface": (huggingface.is_place, huggingface.find_huggingface),
    "webdataset": (shards.is_place, shards.find_shards),
    "folder": (folders.is_folder, folders.find_folder),
}


def find_kind(data: object) -> str | None:
    """Return the `data.name` for a name, path, pattern or address of images; None without one."""
    text = find_own_name(str(data))
    if text in NAMED:
        return text
    return next((kind for kind, (is_place, _) in PLACES.items() if is_place(text)), None)


def require_kind(data: object) -> str:
    """Return `find_kind`. Raises ValueError if no source knows the data."""
    kind = find_kind(data)
    if kind is None:
        problem = explain_file(str(data)) or (
            f"{data} is not a data set ({', '.join(NAMED)}), a table (.csv, .parquet), a"
            f" folder or shards (.tar){suggest(str(data), NAMED) or '; check the path'}"
        )
        raise ValueError(f"--data {problem}")
    return kind


def open_dataset(
    name: str,
    *,
    root: Root = None,
    rule: ImageRule = ImageRule(),  # noqa: B008 (immutable)
    download: bool = True,
) -> DatasetSplits:
    """Open a data set by its `data.name`, at its place or the one to which it is downloaded. Raises
    ValueError if it or a class is unknown, and OSError if the root is missing or a download fails.
    """
    if name == FROM_PYTHON:
        hint = "pass them as dataset=… again, or name other images with --data"
        raise ValueError(f"the images of this model were passed from Python; {hint}")
    name = find_own_name(name)
    check_choice(name, (*PLACES, *NAMED), name="data.name")
    if root is None and (name in PLACES or name == "imagenet"):
        raise ValueError(f"data.name={name} needs data.root, where the images are")
    if rule.finds_labels and name != "folder":
        text = "label_by and the names of columns are for folders and tables"
        raise ValueError(f"{text}, not for data.name={name}; leave them out")
    if root is not None and name in PLACES:
        _, find = PLACES[name]
        listing = find(root, rule)
    else:
        listing = find_named(name, root, rule.classes, download=download)
    return number_listing(listing, rule, name=name, title=name_data(name, root))


def name_data(name: str, root: Root) -> str:
    """Return the name of a data set for readers: for own images that of their folder or file."""
    if not root or name not in PLACES:
        return name
    return expand_home(root).absolute().name


def open_passed(
    dataset: Any,
    class_names: Sequence[str] | None = None,
    *,
    rule: ImageRule,
    model_classes: Sequence[str] | None = None,
) -> DatasetSplits:
    """Open images that are passed from Python, see `find_python_objects`. With the classes of a
    model that is evaluated on them, images in no dictionary are the split "test"."""
    split = "train" if model_classes is None else "test"
    listing = find_python_objects(
        dataset, class_names, split=split, model_classes=model_classes, task=rule.task
    )
    splits = number_listing(listing, rule, name=FROM_PYTHON, title=FROM_PYTHON)
    has_test = model_classes is not None and "test" in splits.own_splits
    return replace(splits, default_split="test" if has_test else "validation")


def open_for_model(
    data: Root,
    *,
    recorded: Mapping[str, Any],
    root: Root = None,
    rule: ImageRule = ImageRule(),  # noqa: B008 (immutable)
) -> DatasetSplits:
    """Open the images on which a trained model is evaluated or explained: `data`, a name or a place,
    or by default those of its training, which its file has `recorded`, see
    `vit.bundle.Bundle.recorded_images`. Other images are labelled by the training's columns, unless
    the rule names some. Raises ValueError if there are none.

    The default split is "test", and "all" for files without one: as far as we know, the model has
    seen none of it. Classes get the names that the model has for them. Nothing is downloaded
    because of a model file, which may be a stranger's.
    """
    # a stranger's file may name any file instead
    mappings = {key: value for key, value in recorded.items() if isinstance(value, Mapping)}
    if data is None or _is_same(str(data), recorded):
        if "name" not in recorded:
            text = "this model doesn't say what it was trained on"
            raise ValueError(f"{text}; name the images with --data")
        # other labels or groups would draw other splits
        for name in (*LABEL_FIELDS, "group_by"):
            value = getattr(rule, name)
            if value is not None and str(value) != str(recorded.get(name)):
                raise ValueError(
                    f"{name} {value} is not that of this model's training, {recorded.get(name)};"
                    " leave it out for the images of the training"
                )
        place = root or recorded.get("root")
        is_asked_for = root is not None or (data is not None and str(data) not in NAMED)
        if not is_asked_for and str(place).startswith("hf:"):
            raise ValueError(
                f"this model was trained on {place}, and a name in a model file is not downloaded"
                f" unasked; add --data {place}"
            )
        known = {each.name: recorded[each.name] for each in fields(rule) if each.name in recorded}
        splits = open_dataset(
            recorded["name"],
            root=place,
            rule=ImageRule(**{**known, "class_names": mappings.get("class_names")}),
            download=data is not None,
        )
        return replace(
            splits,
            written=mappings.get("held_out"),
            num_trained_on=recorded.get("num_trained_on"),
            corrections=mappings.get("corrections", {}),
        )

    kind = require_kind(data)
    is_named = kind in NAMED
    task = rule.task or recorded.get("task")
    # without the columns of the training, patients would count as many, and a table's training
    # images as new ones
    if kind == "folder" and not rule.finds_labels:
        is_table = find_table(expand_home(str(data))) is not None
        shared = [name for name in LABEL_FIELDS if is_table == (name != "label_by")]
        found: dict[str, Any] = {name: recorded.get(name) for name in shared}
        rule = replace(rule, **found)
    rule = replace(rule, class_names=mappings.get("class_names"), task=task)
    splits = open_dataset(kind, root=root if is_named else data, rule=rule)
    has_test = is_named or "test" in splits.own_splits
    return replace(splits, default_split="test" if has_test else "all")


def _is_same(data: str, recorded: Mapping[str, Any]) -> bool:
    """Return true if a model was trained on the images that `data` names."""
    root = recorded.get("root")
    name = find_own_name(data)
    if name in NAMED or root is None:
        return name == find_own_name(str(recorded.get("name", "")))
    return expand_home(data).resolve() == expand_home(root).resolve()
