"""The one door to images: from a data set's name, a folder, a table or shards to its splits."""

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from vit.data.dataset import LabelRule, Request
from vit.data.sources.base import Root
from vit.data.sources.listing import number_listing
from vit.data.sources.python_objects import FROM_PYTHON, find_python_objects
from vit.data.sources.registry import PLACES, find_source, is_named, require_kind
from vit.data.sources.shards import is_remote
from vit.data.sources.tables import find_table
from vit.data.splits import DatasetSplits, SplitRule
from vit.runtime.arguments import HIDDEN, hide_tokens
from vit.runtime.files import default_cache_dir, expand_home


def open_dataset(
    name: str,
    *,
    root: Root = None,
    classes: Sequence[str] | None = None,
    class_names: Mapping[str, str] | None = None,
    rule: SplitRule | None = None,
    download: bool = True,
    cache_dir: Path | None = None,
    labels: LabelRule = LabelRule(),  # noqa: B008 (immutable)
) -> DatasetSplits:
    """Find a data set by its name.

    Args:
        name: Name of a source.
        root: Place where the data is or will be downloaded to.
        classes: Classes to keep, in the order of the set, by name or in words; None keeps all.
        class_names: Class → its name in words, for some classes or all.
        rule: How splits that the set doesn't have are drawn; None for the defaults.
        download: A published set that isn't on this machine may be downloaded.
        cache_dir: Folder for decoded images and downloads; None is $VIT_CACHE or ~/.cache/vit.
        labels: How the class of an image is found, in a folder or a table.

    Raises:
        ValueError: The name or a class is unknown.
        FileNotFoundError: The root is missing.
        OSError: A download fails.
    """
    if name == FROM_PYTHON:
        hint = "pass them as dataset=… again, or name other images with --data"
        raise ValueError(f"the images of this model were passed from Python; {hint}")
    find = find_source(name)
    if root is None and (name in PLACES or name == "imagenet"):
        raise ValueError(f"data.name={name} needs data.root, where the images are")
    if labels._replace(task=None) != LabelRule() and name != "folder":
        text = "label_by and the names of columns are for folders and tables"
        raise ValueError(f"{text}, not for data.name={name}; leave them out")
    cache_dir = cache_dir or default_cache_dir()
    listing = find(Request(root, classes, cache_dir, download, labels))
    images = number_listing(listing, classes=classes, class_names=class_names)
    title = name_data(name, root)
    return DatasetSplits(name, images, rule or SplitRule(), cache_dir, title=title)


def name_data(name: str, root: str | Path | None) -> str:
    """Return the name of a data set for readers: that of its folder or file, if it isn't a published
    one.

    Args:
        name: The data.name.
        root: Where the images are.
    """
    if not root or name not in PLACES:
        return name
    # an address is shown without its parameters
    return expand_home(hide_tokens(str(root)).partition("?")[0]).absolute().name


class RecordedImages(NamedTuple):
    """The record of the training images in a model file.

    Attributes:
        config: Data section of the training's configuration.
        digests: Hashes of the training images' pixels, see `vit.data.duplicates`; None: not
            recorded.
        task: "multilabel" if an image may have several labels.
        held_out: Split → ids of the images that were held out of training; None: not recorded, they
            are drawn by the rule in `config`.
        num_trained_on: See `DatasetSplits`.
    """

    config: Mapping[str, Any] = MappingProxyType({})
    digests: np.ndarray | None = None
    task: str | None = None
    held_out: Mapping[str, Sequence[str]] | None = None
    num_trained_on: int | None = None


def open_for_model(
    data: Root,
    *,
    recorded: RecordedImages,
    root: Root = None,
    labels: LabelRule = LabelRule(),  # noqa: B008 (immutable)
    group_by: int | str | None = None,
) -> DatasetSplits:
    """Open the images on which a trained model is evaluated or explained.

    The default split is "test", and "all" for files without one: as far as we know, the model has
    seen none of it. Classes get the names that the model has for them. Nothing is downloaded
    because of a model file.

    Args:
        data: Name of a data set, or a place that `find_kind` knows; None for the images that the
            model was trained on.
        recorded: Record of these in the model file.
        root: Place of a data set that is given by its name.
        labels: How the classes of other images than those of the training are found; by default as
            recorded.
        group_by: Groups of other images, see `SplitRule`.

    Raises:
        ValueError: There are no such images, or `data` is None and the model file names none.
    """
    config = recorded.config
    # the model file of a stranger may name any file
    class_names = _find_mapping(config, "class_names")
    trained = read_label_rule(config)
    if data is None or _is_same(str(data), config):
        if not config:
            text = "this model doesn't say what it was trained on"
            raise ValueError(f"{text}; name the images with --data")
        # other labels or groups would draw other splits
        for name, value in {**labels._asdict(), "group_by": group_by}.items():
            if value is not None and str(value) != str(config.get(name)):
                raise ValueError(
                    f"{name} {value} is not that of this model's training, {config.get(name)};"
                    " leave it out for the images of the training"
                )
        place = root or config.get("root")
        # an address is saved without its token
        if data is not None and HIDDEN in str(place):
            place = data
        is_asked_for = root is not None or (data is not None and not is_named(str(data)))
        if not is_asked_for and (is_remote(place) or str(place).startswith("hf:")):
            raise ValueError(
                f"this model was trained on {place}, and the address in a model file is not opened"
                f" unasked; name it: --data {place}, or IMAGES of vit explain"
            )
        rule_keys = config.keys() & {field.name for field in fields(SplitRule)}
        splits = open_dataset(
            config["name"],
            root=place,
            classes=config.get("classes"),
            class_names=class_names,
            rule=SplitRule(**{key: config[key] for key in rule_keys}),
            labels=trained._replace(task=recorded.task or trained.task),
            download=data is not None,
        )
        return replace(
            splits,
            written=_find_mapping(recorded._asdict(), "held_out"),
            num_trained_on=recorded.num_trained_on,
            corrections=_find_mapping(config, "corrections") or {},
        )

    kind = require_kind(data)
    # own classes are found as those of the training were
    if kind == "folder" and labels == LabelRule():
        if find_table(expand_home(str(data))) is not None:
            labels = trained._replace(label_by=None)
        else:
            labels = LabelRule(label_by=trained.label_by)
    splits = open_dataset(
        kind,
        root=root if is_named(kind) else data,
        class_names=class_names,
        rule=SplitRule(group_by=group_by),
        labels=labels._replace(task=recorded.task),
    )
    has_test = is_named(kind) or "test" in splits.images.own_splits
    return replace(splits, default_split="test" if has_test else "all")


def _find_mapping(values: Mapping[str, Any], key: str) -> Mapping[str, Any] | None:
    """Return a value that is a mapping; None for others, such as the path of a file."""
    value = values.get(key)
    return value if isinstance(value, Mapping) else None


def read_label_rule(trained_on: Mapping[str, Any]) -> LabelRule:
    """Return how the classes of a model's training images were found."""
    return LabelRule(*(trained_on.get(key) for key in LabelRule._fields))


def _is_same(data: str, trained_on: Mapping[str, Any]) -> bool:
    """Return true if a model was trained on the images that `data` names."""
    root = trained_on.get("root")
    if is_named(data) or root is None:
        return data == trained_on.get("name")
    return expand_home(hide_tokens(data)).resolve() == expand_home(root).resolve()


def open_passed(
    dataset: Any,
    *,
    model_classes: Sequence[str],
    class_names: Sequence[str] | None = None,
    task: str | None = None,
) -> DatasetSplits:
    """Open images that are passed from Python to a trained model.

    They are the split "test". Without a test split in a dictionary, "validation" is the default.

    Args:
        dataset: See `find_python_objects`.
        model_classes: Classes of the model. Integer labels index them if there are no other names.
        class_names: Names of its classes, if it doesn't name them itself.
        task: "multilabel" if the model predicts several labels an image.

    Raises:
        ValueError: See `find_python_objects`.
    """
    images = number_listing(
        find_python_objects(
            dataset, class_names, split="test", model_classes=model_classes, task=task
        )
    )
    return DatasetSplits(
        FROM_PYTHON,
        images,
        SplitRule(validation_fraction=0.0),
        default_cache_dir(),
        default_split="test" if "test" in images.own_splits else "validation",
        title=FROM_PYTHON,
    )
