"""Predict photos with model.onnx beside this file: python predict.py PHOTO ...

It prints a JSON line for each photo, and needs numpy, onnxruntime and Pillow.
"""

import contextlib
import io
import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageCms, ImageOps

# only these: some other formats of Pillow start programs
FORMATS = ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]

session = onnxruntime.InferenceSession(str(Path(__file__).with_name("model.onnx")))
facts = {
    name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()
}
names, preprocess, thresholds = facts["class_names"], facts["preprocess"], facts["thresholds"]


def read_photo(path):
    """Return an upright photo in sRGB, with transparency on white."""
    with Image.open(path, formats=FORMATS) as photo:
        if ";16" in str(photo.tile) and photo.mode in ("RGB", "RGBA"):
            raise ValueError("it has 16 bits a colour, of which 8 would be read; save it with 8")
        if ";16" in str(photo.tile) and getattr(photo, "tag_v2", {}).get(262) == 0:
            raise ValueError("its largest values are black; save it as PNG")
        photo = ImageOps.exif_transpose(photo)
    profile = photo.info.get("icc_profile", b"")
    if photo.mode.startswith("I") or photo.mode == "F":
        if not preprocess.get("value_range"):
            raise ValueError("it has more than 8 bits, and the model knows 8; save it with 8 bits")
        low, high = preprocess["value_range"]
        grey = np.clip((np.asarray(photo, np.float64) - low) / (high - low) * 255, 0, 255)
        photo = Image.fromarray(np.rint(grey).astype(np.uint8))
    if photo.has_transparency_data:
        photo = photo.convert("RGBA")
        photo = Image.alpha_composite(Image.new("RGBA", photo.size, "white"), photo)
    if photo.mode not in ("RGB", "CMYK"):
        photo = photo.convert("RGB")
    with contextlib.suppress(OSError, ImageCms.PyCMSError):
        own = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        if "srgb" not in ImageCms.getProfileDescription(own).lower():
            srgb = ImageCms.createProfile("sRGB")
            photo = ImageCms.profileToProfile(photo, own, srgb, outputMode="RGB")
    return photo.convert("RGB")


def resize(photo):
    """Return the pixels [H, W, 3] that the model sees, as `vit` resizes and cuts them."""
    height, width = preprocess["image_size"]
    resample = Image.Resampling[preprocess["interpolation"].upper()]
    if preprocess.get("resize_mode") == "stretch":
        return np.asarray(photo.resize((width, height), resample))
    # all of the photo but what exceeds the aspect, then the centre
    whole = [round(side / preprocess["crop_pct"]) for side in (width, height)]
    left, top = (whole[0] - width) // 2, (whole[1] - height) // 2
    resized = np.asarray(ImageOps.fit(photo, whole, resample))
    return resized[top : top + height, left : left + width]


def predict(path):
    """Return the answer for a photo."""
    mean, std = (np.array(preprocess[name], np.float32) for name in ("mean", "std"))
    pixels = (resize(read_photo(path)).astype(np.float32) / 255 - mean) / std
    images = pixels.transpose(2, 0, 1)[None]
    ((found,),) = session.run(["probabilities"], {"pixel_values": images})
    order = np.argsort(-found, kind="stable").tolist()
    answer = {"path": path}
    if facts["task"] == "multilabel":
        limits = [thresholds.get(name, 0.5) for name in names]
        answer["labels"] = [names[i] for i in order if found[i] >= limits[i]]
    elif thresholds:
        ((name, threshold),) = thresholds.items()
        place = names.index(name)
        others = [i for i in order if i != place]
        chosen = place if found[place] >= threshold else others[0]
        order.sort(key=lambda i: i != chosen)
    answer["predictions"] = [
        {"index": i, "name": names[i], "probability": float(found[i])} for i in order[:5]
    ]
    return answer


for path in sys.argv[1:]:
    try:
        answer = predict(path)
    except Exception as error:  # broken bytes raise nearly any error in Pillow's decoders
        answer = {"path": path, "error": str(error)}
    # in ASCII, because a terminal would obey control characters in names
    print(json.dumps(answer))
