"""Makes the small model that comes with the package, from a run: weights in half precision.

    python research/package_model.py RUN --root IMAGENETTE --output benchmarks/results

RUN is a run of `vit train imagenette/cpu …`, IMAGENETTE the folder of its images. What is written,
`vit/pretrained/imagenette.safetensors`, is evaluated as it is shipped, on the images of val/, beside
the run's own file; accuracy, interval and the largest difference between the two models'
probabilities of the right class go into its metadata, its card `imagenette.md` and the result file. The hashes of the
training images are left out (0.3 MB), and so is the folder in which they lay; fewer features of training images are
kept than in a run's file, by which photos unlike these are found.
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
from vit.training.data import build_data, build_dataset
from vit.training.model_answers import compute_likeness

NAME = "imagenette"
MAX_BYTES = 6_000_000
NUM_TRAINING_FEATURES = 700
LIMITS = "Ten classes: whatever a photo shows, one of them is predicted. For trying things out, not for use."
CARD = """# imagenette

A vision transformer of {parameters:.2f} million parameters, trained on the 9,469 training photos of
Imagenette v2 (ten classes of ImageNet; fastai, Apache-2.0), at {height}×{width} pixels{taught}. It comes with the package, so that
`vit predict imagenette PHOTO`, `vit explain imagenette PHOTOS` and `vit serve imagenette` answer before anything was
trained. MIT licence, as the code.

| | |
|---|---|
| test accuracy | {top1:.1%} ({low:.1%}–{high:.1%}, 95 % interval), {num_images:,} photos of Imagenette's val/ |
| with mirror images (`--tta hflip`) | {top1_hflip:.1%} |
| classes | {classes} |
| trained | `{command}`, {seconds:.0f} s{note} |
| machine | {machine} |
| commit | {commit} |
{teacher_row}| calibration error | {ece:.1%} (expected calibration error of the temperature in the file, {temperature:.2f}) |
| photos of other classes that are called unusual | {unusual} |
| known photos that are called unusual | {false_alarm:.1%} |
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
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    content = read_model_file(arguments.run / MODEL_FILE)
    halved = halve(content)
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / MODEL_FILE
        write_model_file(path, halved)
        halved = add_likeness(halved, load_bundle(path), root=arguments.root)
        shipped = vit.evaluate(str(path), data=NAME, root=arguments.root)
        mirrored = vit.evaluate(str(path), data=NAME, root=arguments.root, tta="hflip")
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
        "difference_to_float32": difference,
    }
    metadata = {**halved.metadata, "evaluation": figures, "limits": LIMITS}
    target = PRETRAINED_FOLDER / f"{NAME}.safetensors"
    write_model_file(target, dataclasses.replace(halved, metadata=metadata))
    size = target.stat().st_size
    if size > MAX_BYTES:
        raise SystemExit(f"{target} has {size:,} bytes, more than {MAX_BYTES:,}")

    conditions = describe_conditions("cpu")
    card = CARD.format(
        parameters=sum(tensor.numel() for tensor in halved.weights.values()) / 1e6,
        top1=evaluation.top1,
        low=low,
        high=high,
        top1_hflip=mirrored.evaluation.top1,
        num_images=evaluation.num_images,
        classes=", ".join(metadata["class_names"]),
        command=arguments.command,
        seconds=arguments.seconds,
        note=arguments.note and f" ({arguments.note})",
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
    }
    result = {"machine": conditions, "training": training, "bytes": size, **figures}
    write_result(arguments.output, "package-model", result)


def halve(content: ModelFile) -> ModelFile:
    """The file's content with weights in half precision, without what only this machine has."""
    weights = {name: tensor.half() for name, tensor in content.weights.items()}
    config = {**content.metadata["config"]}
    config["data"] = {**config["data"], "root": None}
    metadata = {**content.metadata, "config": config}
    return ModelFile(weights, metadata)


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


if __name__ == "__main__":
    main()
