"""Predict the classes of photographs: python predict.py IMAGE ... prints a JSON line for each, most
probable first."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def read_pixels(path):
    """Upright RGB, uint8 [1, height, width, 3]: 16 bits are scaled to 8, transparency is on white."""
    # no others: some of Pillow's formats start programs
    formats = ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]
    with Image.open(path, formats=formats) as opened:
        if opened.mode == "F" or opened.width * opened.height > 100_000_000:
            raise ValueError(f"{path} has floating-point pixels, or more than 100 million")
        image = ImageOps.exif_transpose(opened)
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        image = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))[None]


session = onnxruntime.InferenceSession(str(Path(__file__).with_name("model.onnx")))
names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
for path in sys.argv[1:]:
    try:
        (scores,) = session.run(["probabilities"], {"images": read_pixels(path)})[0]
        best = np.argsort(-scores, kind="stable")[:5].tolist()
        classes = [{"index": i, "name": names[i], "probability": float(scores[i])} for i in best]
        print(json.dumps({"path": path, "predictions": classes}, ensure_ascii=False))
    except Exception as error:  # Pillow's decoders answer broken bytes with nearly any
        print(json.dumps({"path": path, "error": str(error)}, ensure_ascii=False))
