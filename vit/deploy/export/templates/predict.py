"""Predict the classes or labels of photographs: python predict.py IMAGE ... prints a JSON line for
each."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime
from PIL import Image, ImageOps

from vit.data.depth import guess_range, is_deep, read_values, refuse_dicom, scale_values
from vit.prediction.conformal import MAX_P_UNUSUAL


def read_pixels(path, value_range=None):
    """Read upright RGB, uint8 [1, height, width, 3]: transparency becomes white, and of more than 8
    bits the model's range becomes 0 to 255."""
    refuse_dicom(path)
    # only these: some formats of Pillow start programs
    formats = ["AVIF", "BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP"]
    with Image.open(path, formats=formats) as opened:
        if opened.width * opened.height > 100_000_000 or max(opened.size) > 65_535:
            raise ValueError(f"{path} has more than 100 million pixels or 65,535 a side")
        if is_deep(opened):
            values, limits, is_inverted = read_values(opened)
            low, high = value_range or guess_range(values, limits)
            image = Image.fromarray(scale_values(values, low, high, is_inverted=is_inverted))
        else:
            image = ImageOps.exif_transpose(opened)
    if image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        image = image.convert("LA" if image.mode == "La" else "RGBA").convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return np.asarray(image.convert("RGB"))[None]


session = onnxruntime.InferenceSession(str(Path(__file__).with_name("model.onnx")))
facts = session.get_modelmeta().custom_metadata_map
names = json.loads(facts["class_names"])
value_range = json.loads(facts["preprocess"]).get("value_range")
kinds = [output.name for output in session.get_outputs()]
for path in sys.argv[1:]:
    try:
        pixels = read_pixels(path, value_range)
        outputs = dict(zip(kinds, session.run(kinds, {"images": pixels}), strict=True))
        scores = outputs["probabilities"][0]
        order = np.argsort(-scores, kind="stable").tolist()
        listed = order
        answer = {"path": path}
        if facts.get("task") == "multilabel":
            answer["labels"] = [names[i] for i in order if outputs["predicted"][0, i]]
        elif "predicted" in outputs:
            # the predicted class comes first, whatever its probability
            listed = sorted(order, key=lambda i: not outputs["predicted"][0, i])
        best = [{"index": i, "name": names[i], "probability": float(scores[i])} for i in listed[:5]]
        answer |= {"predictions": best, "note": "", "prediction_set": None, "p_value": None}
        if "prediction_set" in outputs:
            chosen = [names[i] for i in order if outputs["prediction_set"][0, i]]
            answer["prediction_set"] = chosen
            # an operating point decides in any case
            answer["note"] = "unsure" if len(chosen) != 1 and "predicted" not in outputs else ""
        if "p_value" in outputs:
            answer["p_value"] = float(outputs["p_value"][0])
            # unlike the training photos
            if answer["p_value"] <= MAX_P_UNUSUAL:
                answer["note"] = "unusual"
    except Exception as error:  # broken bytes raise nearly any error in Pillow's decoders
        answer = {"path": path, "error": str(error)}
    line = json.dumps(answer, ensure_ascii=False)
    # a terminal would obey control characters in names: they are escaped
    print(line if line.isprintable() else json.dumps(answer))
