"""Images, items and labels in the forms in which Python programs hold them.

Each form is recognised without a doubt, or refused with a sentence.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from vit.runtime.arguments import describe_kind, shorten

# keys of an item that is a dictionary
_IMAGE_KEYS = ("image", "img", "pixel_values")
_LABEL_KEYS = ("label", "labels")
# so far may values lie outside 0 to 1: by less than half of a step of 8 bits
_TOLERANCE = 1 / 512


def is_tensor(value: Any) -> bool:
    """Return true for a tensor of torch."""
    # torch takes a second to import; without it there is no tensor
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def is_pixels(value: Any) -> bool:
    """Return true for an image, or several, in memory."""
    if isinstance(value, Image.Image):
        return True
    return hasattr(value, "__array__") and np.ndim(value) >= 2


def convert_pixels(pixels: Any, *, name: str = "") -> np.ndarray:
    """Return one image in memory as [H, W, 3] or [H, W]: of uint8, or of the type of its values if
    they need more bits.

    Args:
        pixels: An array or tensor [H, W], [H, W, 1], [H, W, 3], [1, H, W] or [3, H, W], of uint8,
            of floating-point values from 0 to 1, or of values of more bits.
        name: Name of the image in messages.

    Raises:
        ValueError: It has another type or shape, its shape may be read in two ways, or the values
            of a tensor are beyond 0 to 1, as after Normalize.
    """
    kind = "an array"
    if is_tensor(pixels):
        kind = "a tensor"
        pixels = pixels.detach().cpu()
        # numpy has no bfloat16
        pixels = pixels.float() if pixels.is_floating_point() else pixels
    array = np.asarray(pixels)
    text = f"{name} is {kind}" if name else kind
    if array.dtype.kind == "f":
        low, high = float(array.min(initial=0.0)), float(array.max(initial=1.0))
        # false for NaN, too
        if low >= -_TOLERANCE and high <= 1 + _TOLERANCE:
            array = np.rint(array.clip(0, 1) * 255).astype(np.uint8)
        elif kind == "a tensor":
            raise ValueError(
                f"{text} of values from {low:.3g} to {high:.3g}, not 0 to 1; divide by the largest"
                " possible value, and leave out Normalize, vit normalises by itself"
            )
    is_first = array.ndim == 3 and array.shape[0] in (1, 3)
    is_last = array.ndim == 3 and array.shape[2] in (1, 3)
    if is_first and is_last:
        raise ValueError(
            f"{text} of shape {list(array.shape)}, whose channels may be the first or the last; pass"
            " a PIL image"
        )
    if is_first:
        array = array.transpose(1, 2, 0)
    if is_first or is_last:
        array = array[..., 0] if array.shape[2] == 1 else array
    is_number = array.dtype.kind in "iuf" and array.dtype != np.int8
    if not is_number or not (array.ndim == 2 or is_first or is_last):
        # numpy's name, also of the values of a tensor
        raise ValueError(
            f"{text} of {np.asarray(pixels).dtype} {list(np.shape(pixels))}, not an image; pass uint8"
            " of 0 to 255 or floats of 0 to 1, as [H, W, 3], [3, H, W] or [H, W]"
        )
    return array


def list_items(dataset: Any) -> Any:
    """Return a set of items that has a length and is read by index: a map-style set as it is, and
    anything else that can be iterated over as a list.

    Raises:
        ValueError: It is something else, or a DataLoader.
    """
    if is_loader(dataset):
        raise ValueError(
            "dataset is a DataLoader; pass its .dataset, without Normalize: vit batches by itself"
        )
    # the keys of pandas' DataFrame are its columns
    is_text = isinstance(dataset, str | bytes | Path | Mapping) or hasattr(dataset, "iloc")
    if not is_text and hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return dataset
    if is_text or not isinstance(dataset, Iterable):
        text = f"dataset is {describe_kind(dataset)}"
        raise ValueError(
            f"{text}, not (images, labels) nor a data set of torch; a table of paths and labels is"
            " read from its file (data.root=TABLE.csv)"
        )
    return list(dataset)


def is_loader(dataset: Any) -> bool:
    """Return true for a DataLoader of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(dataset, torch.utils.data.DataLoader)


def split_item(item: Any, *, name: str) -> tuple[Any, Any]:
    """Return the image and the label of an item: a pair, or a dictionary with the keys image (img,
    pixel_values) and label (labels).

    Raises:
        ValueError: It is neither; `name` names it.
    """
    if isinstance(item, Mapping):
        found = [key for keys in (_IMAGE_KEYS, _LABEL_KEYS) for key in keys if key in item]
        if len(found) != 2 or found[0] not in _IMAGE_KEYS or found[1] not in _LABEL_KEYS:
            have = shorten(", ".join(map(str, item)))
            raise ValueError(f"{name} has the keys {have}; name one of them image and one label")
        return item[found[0]], item[found[1]]
    if not isinstance(item, tuple | list) or len(item) != 2:
        expected = "a pair (image, label) or a dictionary with these keys"
        raise ValueError(f"{name} is {describe_kind(item)}, not {expected}")
    return item[0], item[1]


def find_class_names(dataset: Any) -> Sequence[str] | None:
    """Return the class names that a set has: its attribute `classes`, or the names of its label in
    the features of a set of Hugging Face; also those of the set that a Subset is of."""
    while dataset is not None:
        names = getattr(dataset, "classes", None)
        features = getattr(dataset, "features", None)
        if names is None and isinstance(features, Mapping):
            labels = [features[key] for key in _LABEL_KEYS if key in features]
            names = find_feature_names(labels[0]) if labels else None
        if names is not None:
            return tuple(map(str, names))
        dataset = getattr(dataset, "dataset", None)
    return None


def find_feature_names(feature: Any) -> tuple[str, ...] | None:
    """Return the names of the classes in a feature of a set of Hugging Face, one class or a list of
    them; None if it has none."""
    # a list of one feature, which older versions write so, or a feature of lists
    inner = feature[0] if isinstance(feature, list) else getattr(feature, "feature", feature)
    names = getattr(inner, "names", None)
    return None if names is None else tuple(map(str, names))


def as_plain(label: Any) -> Any:
    """Return a label as a text, a whole number or a list; others as they are."""
    if is_tensor(label):
        label = label.detach().cpu().numpy()
    if isinstance(label, np.ndarray | np.generic):
        label = label.tolist()
    if isinstance(label, list | tuple | set | frozenset):
        return [as_plain(each) for each in label]
    if isinstance(label, bool | float) and label == label // 1:
        return int(label)
    return label


def iterate_images(images: Any) -> Iterator[Any]:
    """Yield the images of a list or a set one by one, without their labels: paths and images in
    memory, as they are.

    Raises:
        ValueError: It is neither.
    """
    if is_loader(images):
        images = images.dataset
    if isinstance(images, Mapping):
        yield _take_image(images)
    elif isinstance(images, tuple) and len(images) == 2 and _are_labels(images[1], images[0]):
        yield images[0]
    elif isinstance(images, Iterable):
        for item in images:
            if isinstance(item, Mapping):
                yield _take_image(item)
            elif isinstance(item, tuple) and len(item) == 2 and _are_labels(item[1], item[0]):
                yield item[0]
            else:
                yield item
    # sets of torch are read by index
    elif hasattr(images, "__getitem__") and hasattr(images, "__len__"):
        for index in range(len(images)):
            yield from iterate_images([images[index]])
    else:
        expected = "a path, an image, an array, a data set or a list of them"
        raise ValueError(f"images is {describe_kind(images)}, not {expected}")


def _take_image(item: Mapping[str, Any]) -> Any:
    found = [key for key in _IMAGE_KEYS if key in item]
    if len(found) != 1:
        have = shorten(", ".join(map(str, item)))
        raise ValueError(f"an item of images has the keys {have}; name one of them image")
    return item[found[0]]


def _are_labels(labels: Any, images: Any) -> bool:
    """Return true for the label of an image, or the labels of several, in memory."""
    if not is_pixels(images):
        return False
    if isinstance(labels, str):
        return Path(labels).suffix == ""
    return isinstance(labels, int | float) or (hasattr(labels, "__array__") and np.ndim(labels) < 2)
