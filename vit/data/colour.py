"""Colour profiles: photos in another colour space, such as Display P3, become sRGB."""

import io
from functools import lru_cache

import numpy as np
from PIL import Image, ImageCms

# colour space of a profile → mode of the images that it converts
_MODES = {"RGB": "RGB", "GRAY": "L", "CMYK": "CMYK"}
# A profile that changes colours by less, in levels of 256 on average, is one of sRGB. With the curve
# of gamma 2.2 instead of sRGB's it is 0.8; Display P3 and Adobe RGB change them by 9.
_MAX_CHANGE = 2


def convert_to_srgb(image: Image.Image, profile: bytes) -> Image.Image:
    """Convert an 8-bit image without transparency to RGB by its profile. Its values stay as they
    are with a profile of sRGB, a broken one, or one of images of another mode."""
    mode, transform = _build_transform(profile)
    if image.mode != mode:
        image = image.convert("RGB")
    if transform is None or image.mode != mode:
        return image.convert("RGB")
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None
    # without the profile, which holds no longer
    converted.info = {key: value for key, value in image.info.items() if key != "icc_profile"}
    return converted


# photos of one camera have one profile
@lru_cache(maxsize=64)
def _build_transform(profile: bytes) -> tuple[str, ImageCms.ImageCmsTransform | None]:
    """Build the transform from a profile to sRGB, and return the mode of its images; None for a
    profile that changes nothing."""
    try:
        opened = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        mode = _MODES[opened.profile.xcolor_space.strip()]
        transform = ImageCms.buildTransform(opened, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (OSError, KeyError, ImageCms.PyCMSError):
        return "RGB", None
    num_channels = Image.getmodebands(mode)
    levels = [np.arange(0, 256, 51)] * num_channels
    colours = np.stack(np.meshgrid(*levels), axis=-1).astype(np.uint8).reshape(-1, 6, num_channels)
    sample = Image.fromarray(colours.squeeze(), mode)
    changed, plain = (
        np.asarray(each, np.float64)
        for each in (ImageCms.applyTransform(sample, transform), sample.convert("RGB"))
    )
    is_srgb = np.abs(changed - plain).mean() <= _MAX_CHANGE
    return mode, None if is_srgb else transform
