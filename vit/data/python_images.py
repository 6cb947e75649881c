"""Images in memory and items in the forms in which Python programs hold them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from vit.runtime.arguments import check_kind, shorten

# keys of an item that is a dictionary, and columns of a data set on the Hub
IMAGE_KEYS = ("image", "img")
LABEL_KEYS = ("label", "labels", "class")
# so far may values lie outside 0 to 1: by less than half of a step of 8 bits
_TOLERANCE = 1 / 512


def convert_pixels(pixels: Any, *, name: str = "an image") -> np.ndarray:
    """Return one image in memory as [H, W, 3] or [H, W]: of uint8, or of the type of its values if
    they need more bits.

    It is an array or tensor, also [H, W, 1], [1, H, W] or [3, H, W], of uint8, of floating-point
    values from 0 to 1, or of values of more bits. Raises ValueError for another one, if its shape
    may be read in two ways, and if the values of a tensor are beyond 0 to 1, as after Normalize.
    """
    is_tensor = hasattr(pixels, "detach")
    if is_tensor:
        pixels = pixels.detach().cpu()
        # numpy has no bfloat16
        pixels = pixels.float() if pixels.is_floating_point() else pixels
    array = np.asarray(pixels)
    is_right = array.dtype.kind in "iuf"
    if array.dtype.kind == "f":
        # false for NaN, too
        has_range = array.min(initial=0) >= -_TOLERANCE and array.max(initial=1) <= 1 + _TOLERANCE
        is_right = has_range or not is_tensor
        if has_range:
            array = np.rint(array.clip(0, 1) * 255).astype(np.uint8)
    is_first, is_last = (array.ndim == 3 and array.shape[axis] in (1, 3) for axis in (0, -1))
    if not is_right or not (array.ndim == 2 or is_first != is_last):
        raise ValueError(
            f"{name} is {array.dtype} {list(array.shape)}, not pixels: pass uint8 of 0 to 255 or"
            " floats of 0 to 1 (without Normalize, vit normalises by itself), as [H, W, 3],"
            " [3, H, W] or [H, W]"
        )
    if is_first:
        array = array.transpose(1, 2, 0)
    return array[..., 0] if array.shape[2:] == (1,) else array


def find_key(item: Mapping[str, Any], known: Sequence[str], *, name: str) -> str:
    """Return the one of the known keys that an item has. Raises ValueError if it isn't one."""
    found = [key for key in known if key in item]
    if len(found) != 1:
        have = shorten(", ".join(map(str, item)))
        raise ValueError(f"{name} has {have}; call one of them {' or '.join(known)}")
    return found[0]


def iterate_images(images: Any) -> Iterator[Any]:
    """Yield the images of a list or a set one by one, as they are. Labels of items, see
    `find_python_objects`, are left out. Raises ValueError if it is neither."""
    if isinstance(images, Mapping):
        images = [images]
    elif hasattr(images, "__getitem__"):
        # sets of torch are read by index
        images = map(images.__getitem__, range(len(images)))
    expected = "a path, an image, an array, a data set or a list of them"
    check_kind(images, Iterable, name="images", expected=expected)
    for item in images:
        if isinstance(item, Mapping):
            yield item[find_key(item, IMAGE_KEYS, name="an item of images")]
        elif isinstance(item, tuple) and len(item) == 2:
            yield item[0]
        else:
            yield item
