"""Draw one map over one image, and write the picture."""

from functools import partial
from pathlib import Path

import torch
from jaxtyping import Float
from torch import Tensor

from vit.data.images import ImageInput, list_images, read_image
from vit.data.preprocess import Geometry, Preprocess
from vit.explanation.render.scale import PatchMap, fit_scale, relative_to_uniform
from vit.runtime.files import write_atomically


def save_overlay(
    path: str | Path,
    image: ImageInput,
    values: Float[Tensor, "rows columns"] | PatchMap,
    *,
    preprocess: Preprocess | None,
    signed: bool | None = None,
    caption: str = "",
) -> None:
    """Draw one map over one image, and write a picture of the image, its heat map
    and the colours.

    Args:
        path: File of the picture; its suffix is the format: .png, .jpg, .svg or
            .pdf.
        image: A path, a PIL image or a uint8 array [H, W, 3].
        values: Map on the patch grid, [rows, columns]; drawn in multiples of
            its mean magnitude.
        preprocess: Preprocessing of the model, whose crop is the part of the
            image under the map. None: the model saw the whole image.
        signed: Put zero in the middle of the colours. None: if a value is
            negative.
        caption: A line below the picture.

    Raises:
        ValueError: The image can't be read.

    Example:
        >>> result = vit.explain("runs/digits", "photo.png", methods="rollout")
        >>> rollout = result.maps["rollout"]
        >>> preprocess = result.bundle.preprocess
        >>> vit.save_overlay(
        ...     "map.png", "photo.png", rollout[0], preprocess=preprocess
        ... )
    """
    photo = next(list_images(image))
    if isinstance(photo, str):
        photo = read_image(Path(photo))
    if preprocess is None:
        # without a preprocessing, the model is taken to have seen the whole image
        geometry = Geometry(photo.size, box=(0.0, 0.0, float(photo.width), float(photo.height)))
    else:
        photo = preprocess.to_rgb(photo)
        geometry = preprocess.geometry(photo.size)
    array = relative_to_uniform(torch.as_tensor(values).detach().float().cpu().numpy())
    if signed is None:
        signed = bool((array < 0).any())
    from vit.explanation.render.figure import save_figure  # matplotlib takes half a second

    # the temporary file has another suffix, so the format is named
    kind = Path(path).suffix.lower().lstrip(".") or "png"
    draw = partial(
        save_figure,
        image=photo,
        values=array,
        geometry=geometry,
        kind=kind,
        scale=fit_scale([array], signed=signed),
        caption=[caption] if caption else [],
    )
    write_atomically(Path(path), draw)
