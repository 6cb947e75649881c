"""Makes the small model that comes with the package, from a run: weights in half precision.

    PYTHONPATH=.:benchmarks:research python research/package_model.py RUN --root IMAGENETTE \
        --teacher "NAME (LICENCE, ORIGIN)" --foreign FOLDER --other-foreign FOLDER --output benchmarks/results

RUN is a run of `vit train imagenette/cpu …`, IMAGENETTE the folder of its images. What is written,
`vit/pretrained/imagenette.safetensors`, is evaluated as it is shipped, on the images of val/, beside
the run's own file; accuracy, interval and the largest difference between the two models'
probabilities of the right class go into its metadata, its card `imagenette.md` and the result file, and so do the
photos of other classes that it calls unusual. The hashes of the training images are left out (0.3 MB), and so are the
folders in which they and the teacher lay; fewer features of training images are kept than in a run's file, by which
unusual photos are found.
"""

import argparse
import dataclasses
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from conditions import describe_conditions, write_result

import vit
from vit.bundle import MODEL_FILE, PRETRAINED_FOLDER, Bundle, load_bundle
from vit.config import load_config
from vit.model.model_file import ModelFile, read_model_file, write_model_file
from vit.prediction.conformal import is_unusual, predict_p_values
from vit.prediction.features import compute_readable_features
from vit.training.data import build_data, build_dataset
from vit.training.model_answers import compute_likeness

NAME = "imagenette"
MAX_BYTES = 6_000_000
NUM_TRAINING_FEATURES = 1000
LIMITS = "Ten classes: whatever a photo shows, one of them is predicted. For trying things out, not for use."
CARD = """# imagenette

A vision transformer of {parameters:.2f} million parameters, trained on the 9,469 training photos of
Imagenette v2 (ten classes of ImageNet; fastai, Apache-2.0), at {size}×{size} pixels. It comes with the package, so that
`vit predict imagenette PHOTO`, `vit explain imagenette PHOTOS` and `vit serve imagenette` answer before anything was
trained. MIT licence, as the code.

| | |
|---|---|
| test accuracy | {top1:.1%} ({low:.1%}–{high:.1%}, 95 % interval), {num_images:,} photos of Imagenette's val/ |
| with mirror images (`--tta hflip`) | {top1_hflip:.1%} |
| calibration error | {ece:.1%} on the same photos, with the temperature in the file |
| classes | {classes} |
| called unusual (p-value of at most 0.05) | {foreign} photos of other classes of ImageNet, one of each; {known_unusual:.1%} of Imagenette's val/ |
| trained | `{command}`, {seconds:.0f} s{note} |
| teacher | {teacher} |
| machine | {machine} |
| commit | {commit} |
| precision | half: the right class's probability differs by at most {difference:.4f} from float32 |
| limits | {limits} |

`python research/package_model.py` made this file and the model beside it.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--command", required=True, help="that trained the run")
    parser.add_argument("--seconds", type=float, required=True, help="that the training took")
    parser.add_argument("--note", default="", help="on these seconds")
    parser.add_argument("--commit", required=True, help="of the training")
    parser.add_argument("--teacher", required=True, help="with its licence and origin")
    parser.add_argument("--foreign", type=Path, required=True, help="photos of other classes")
    parser.add_argument("--other-foreign", type=Path, required=True, help="more of them")
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    content = read_model_file(arguments.run / MODEL_FILE)
    halved = halve(content, teacher=arguments.teacher)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / MODEL_FILE
        write_model_file(path, halved)
        halved = add_likeness(halved, load_bundle(path), root=arguments.root)
        write_model_file(path, halved)
        shipped = vit.evaluate(str(path), data=NAME, root=arguments.root)
        mirrored = vit.evaluate(str(path), data=NAME, root=arguments.root, tta="hflip")
        unusual = count_unusual(path, arguments.foreign, arguments.other_foreign, arguments.root)
    own = vit.evaluate(str(arguments.run), data=NAME, root=arguments.root)

    differences = np.abs(shipped.scores.label_probability - own.scores.label_probability)
    difference = float(differences.max())
    evaluation = shipped.evaluation
    low, high = evaluation.intervals["top1"]
    figures: dict[str, Any] = {
        "images": "val/ of Imagenette v2",
        "num_images": evaluation.num_images,
        "top1": evaluation.top1,
        "top1_low": low,
        "top1_high": high,
        "top1_hflip": mirrored.evaluation.top1,
        "ece": evaluation.ece,
        "difference_to_float32": difference,
        **unusual,
    }
    metadata = {**halved.metadata, "evaluation": figures, "limits": LIMITS}
    target = PRETRAINED_FOLDER / f"{NAME}.safetensors"
    write_model_file(target, dataclasses.replace(halved, metadata=metadata))
    size = target.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{target} has {size:,} bytes, more than {MAX_BYTES:,}")

    conditions = describe_conditions("cpu")
    foreign = [
        f"{unusual[f'{name}_unusual']:,} of {unusual[name]:,}" for name in ("foreign", "other_foreign")
    ]
    card = CARD.format(
        parameters=sum(tensor.numel() for tensor in halved.weights.values()) / 1e6,
        size=metadata["preprocess"]["image_size"][0],
        top1=evaluation.top1,
        low=low,
        high=high,
        top1_hflip=mirrored.evaluation.top1,
        ece=evaluation.ece,
        num_images=evaluation.num_images,
        classes=", ".join(metadata["class_names"]),
        foreign=" and ".join(foreign),
        known_unusual=unusual["known_unusual"],
        command=arguments.command,
        seconds=arguments.seconds,
        note=arguments.note and f" ({arguments.note})",
        teacher=arguments.teacher,
        machine=conditions["device"],
        commit=arguments.commit,
        difference=difference,
        limits=LIMITS,
    )
    target.with_suffix(".md").write_text(card)
    training = {
        "command": arguments.command,
        "seconds": arguments.seconds,
        "note": arguments.note,
        "commit": arguments.commit,
        "teacher": arguments.teacher,
    }
    result = {"machine": conditions, "training": training, "bytes": size, **figures}
    write_result(arguments.output, "package-model", result)


def halve(content: ModelFile, *, teacher: str) -> ModelFile:
    """The file's content with weights in half precision, without what only this machine has."""
    weights = {name: tensor.half() for name, tensor in content.weights.items()}
    config = {**content.metadata["config"]}
    config["data"] = {**config["data"], "root": None, "cache_dir": None}
    config["train"] = {**config["train"], "teacher": teacher}
    metadata = {**content.metadata, "config": config}
    return ModelFile(weights, metadata, likeness=content.likeness)


def add_likeness(content: ModelFile, bundle: Bundle, *, root: Path) -> ModelFile:
    """The content with features of training images, so many as the file has room for."""
    config = load_config(bundle.config, [f"data.root={root}"])
    data = build_data(config, build_dataset(config), device=torch.device("cpu"))
    likeness, training_images = compute_likeness(
        data, bundle, max_training_features=NUM_TRAINING_FEATURES
    )
    conformal = {
        **content.metadata["conformal"],
        "num_training_features": len(likeness.training_features),
        "num_distances": len(likeness.distances),
        "training_images": training_images,
    }
    metadata = {**content.metadata, "conformal": conformal}
    return dataclasses.replace(content, metadata=metadata, likeness=likeness)


def count_unusual(path: Path, foreign: Path, other_foreign: Path, root: Path) -> dict[str, Any]:
    """How many photos of other classes, and which part of val/, are called unusual."""
    found: dict[str, Any] = {}
    for name, folder in (("foreign", foreign), ("other_foreign", other_foreign)):
        predictions = vit.predict(str(path), folder).predictions
        found[name] = len(predictions)
        found[f"{name}_unusual"] = sum(is_unusual(one.p_value) for one in predictions)
    bundle = load_bundle(path)
    config = load_config({"data": {"name": NAME, "root": str(root)}})
    features, _ = compute_readable_features(bundle, build_dataset(config).split("test"))
    p_values = predict_p_values(bundle, features)
    assert p_values is not None
    found["known_unusual"] = float(np.mean([is_unusual(value) for value in p_values]))
    return found


if __name__ == "__main__":
    main()
