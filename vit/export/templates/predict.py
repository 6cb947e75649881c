"""Predict the classes of photographs: python predict.py IMAGE ... prints a JSON line for each, most
probable first."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps


def read_pixels(path):
    """Upright RGB, uint8 [1, height, width, 3]: 16 bits are scaled to 8, transparency is laid on
    white."""
    image = ImageOps.exif_transpose(Image.open(path))
    if image.mode.startswith("I"):
        grey = np.clip(np.asarray(image, dtype=np.int64), 0, 65535)
        image = Image.fromarray(((grey + 128) // 257).astype(np.uint8))
    if image.mode in ("La", "RGBa"):
        image = image.convert(image.mode.upper())
    if image.mode in ("LA", "PA", "RGBA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))[None]


def main(paths, top_k=5):
    session = onnxruntime.InferenceSession(str(Path(__file__).with_name("model.onnx")))
    names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    for path in paths:
        (scores,) = session.run(["probabilities"], {"images": read_pixels(path)})[0]
        best = np.argsort(-scores, kind="stable")[:top_k].tolist()
        classes = [{"index": i, "name": names[i], "probability": float(scores[i])} for i in best]
        print(json.dumps({"path": path, "predictions": classes}, ensure_ascii=False))


if __name__ == "__main__":
    main(sys.argv[1:])
