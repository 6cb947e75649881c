"""Make a model that comes with the package from a run: half precision, without this machine's paths.

    python scripts/package_model.py RUN vit/pretrained/NAME.safetensors --data NAME --root FOLDER

The file is evaluated as it is shipped, on the test images, beside the run's own. Its accuracy is written into its
metadata and into a card beside it, NAME.md.
"""

import argparse
from pathlib import Path
from typing import Any

import numpy as np
import torch

import vit
from vit.model.find_file import MODEL_FILE
from vit.model.model_file import ModelFile, read_model_file, write_model_file

MAX_BYTES = 7_000_000
CARD = """# {name}

{parameters:.2f} million parameters, images of {size} pixels. MIT licence, as the code.

| | |
|---|---|
| test accuracy | {top1:.1%} ({low:.1%}–{high:.1%}, 95 % interval), {num_images:,} images |
| classes | {classes} |
| precision | half: the right class's probability differs by at most {difference:.4f} from float32 |

`python scripts/package_model.py` made this file and the model beside it.
"""


def halve(content: ModelFile) -> ModelFile:
    """Return the content in half precision, without hashes of training images and without paths."""
    weights: dict[str, torch.Tensor] = {key: value.half() for key, value in content.weights.items()}
    config = {**content.metadata["config"]}
    config["data"] = {**config["data"], "root": None}
    metadata = {**content.metadata, "config": config}
    return ModelFile(weights, metadata, likeness=content.likeness)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("output", type=Path, help="the model file to write")
    parser.add_argument("--data", help="the images; default: those of the training")
    parser.add_argument("--root", type=Path, help="their folder")
    arguments = parser.parse_args()
    images: dict[str, Any] = {"data": arguments.data, "root": arguments.root}

    content = halve(read_model_file(arguments.run / MODEL_FILE))
    write_model_file(arguments.output, content)
    if arguments.output.stat().st_size > MAX_BYTES:
        raise SystemExit(f"{arguments.output} has more than {MAX_BYTES:,} bytes")
    shipped = vit.evaluate(arguments.output, num_examples=0, **images)
    own = vit.evaluate(arguments.run, num_examples=0, **images)
    differences = shipped.scores.label_probability - own.scores.label_probability
    low, high = shipped.evaluation.intervals["top1"]
    card = CARD.format(
        name=arguments.output.stem,
        parameters=sum(tensor.numel() for tensor in content.weights.values()) / 1e6,
        size=content.metadata["preprocess"]["image_size"][0],
        top1=shipped.evaluation.metrics["top1"],
        low=low,
        high=high,
        num_images=shipped.evaluation.num_images,
        classes=", ".join(content.metadata["class_names"]),
        difference=float(np.abs(differences).max()),
    )
    arguments.output.with_suffix(".md").write_text(card)


if __name__ == "__main__":
    main()
