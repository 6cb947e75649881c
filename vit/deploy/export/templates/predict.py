"""Predict the classes or labels of photographs: python predict.py IMAGE ... prints a JSON line for
each."""

import json
import sys
from pathlib import Path

import numpy as np
import onnxruntime

from vit.deploy.export.templates.read_image import read_rgb
from vit.prediction.conformal import MAX_P_UNUSUAL

session = onnxruntime.InferenceSession(str(Path(__file__).with_name("model.onnx")))
facts = session.get_modelmeta().custom_metadata_map
names = json.loads(facts["class_names"])
count = session.get_inputs()[0].shape[0]  # a number where batches are fixed, else a name
value_range = json.loads(facts["preprocess"]).get("value_range")
kinds = [output.name for output in session.get_outputs()]
for path in sys.argv[1:]:
    try:
        pixels = np.stack([read_rgb(path, value_range)] * (count if isinstance(count, int) else 1))
        outputs = dict(zip(kinds, session.run(kinds, {"images": pixels}), strict=True))
        scores = outputs["probabilities"][0]
        order = np.argsort(-scores, kind="stable").tolist()
        listed = order
        labels = None
        if facts.get("task") == "multilabel":
            labels = [names[i] for i in order if outputs["predicted"][0, i]]
        elif "predicted" in outputs:
            # the predicted class comes first, whatever its probability
            listed = sorted(order, key=lambda i: not outputs["predicted"][0, i])
        best = [{"index": i, "name": names[i], "probability": float(scores[i])} for i in listed[:5]]
        predicted = best[0]["name"] if labels is None else "|".join(labels)
        answer = {"path": path, "predicted": predicted, "probability": best[0]["probability"]}
        if labels is not None:
            answer["labels"] = labels
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
    answer["precision"] = facts["precision"]
    line = json.dumps(answer, ensure_ascii=False)
    # a terminal would obey control characters in names: they are escaped
    print(line if line.isprintable() else json.dumps(answer))
