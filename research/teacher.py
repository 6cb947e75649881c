"""What `train.teacher` brings: the same recipe with and without a teacher, on few and on all photos.

    PYTHONPATH=.:benchmarks:research python research/teacher.py --imagenette IMAGENETTE --weights WEIGHTS \
        --weights-name "ViT-S/14 of …" --output benchmarks/results

Every `--keep`-th training photo is kept. Both runs have the same epochs, hence the same steps; the seconds are those of
their training loops. The teacher's answers are computed before, once, and their seconds are given apart. Accuracy is that
of all photos in val/. With `--foreign FOLDER` (photos of other classes) also the share of them that is called unusual.
"""

import argparse
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

from conditions import describe_conditions, write_result

import vit
from vit.prediction.conformal import is_unusual

SHAPE = ["model.embed_dim=192", "model.depth=7", "model.num_heads=3"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--imagenette", type=Path, required=True)
    parser.add_argument("--weights", required=True, help="the teacher, as train.teacher takes it")
    parser.add_argument("--weights-name", required=True, help="in the result")
    parser.add_argument("--keep", type=int, default=4)
    parser.add_argument("--epochs", type=int, default=32)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--foreign", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()

    runs: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as directory:
        folder = Path(directory)
        os.environ["VIT_CACHE"] = str(folder / "cache")
        photos = folder / "photos"
        for source in sorted((arguments.imagenette / "train").iterdir()):
            (photos / source.name).mkdir(parents=True)
            for photo in sorted(source.iterdir())[:: arguments.keep]:
                shutil.copy(photo, photos / source.name)
        settings = ["data.name=folder", f"data.root={photos}", "data.test_fraction=0", *SHAPE]
        settings += [f"train.epochs={arguments.epochs}", "train.evaluate_every_epochs=8"]
        for seed in range(arguments.seeds):
            for is_taught in (False, True):
                own = [f"train.seed={seed}"]
                if is_taught:
                    own.append(f"train.teacher={arguments.weights}")
                run = folder / f"run-{seed}-{is_taught}"
                result = vit.train(
                    "imagenette/cpu", output=run, overrides=[*settings, *own], show_plan=True
                )
                found = vit.evaluate(run, data=arguments.imagenette / "val", num_examples=0).evaluation
                measured = {
                    "teacher": is_taught,
                    "seed": seed,
                    "steps": result.steps,
                    "seconds": round(result.seconds, 1),
                    "top1": found.top1,
                    "interval": list(found.intervals["top1"]),
                    "images": found.num_images,
                }
                if arguments.foreign:
                    predictions = vit.predict(run, arguments.foreign).predictions
                    unusual = [is_unusual(prediction.p_value) for prediction in predictions]
                    measured["foreign_unusual"] = sum(unusual) / len(unusual)
                    measured["foreign"] = len(unusual)
                runs.append(measured)
                print(measured, flush=True)
    result = {
        "machine": describe_conditions("cpu"),
        "teacher": arguments.weights_name,
        "photos": f"every {arguments.keep}th training photo of Imagenette, of which 10 % for validation",
        "runs": runs,
    }
    write_result(arguments.output, "teacher", result)


if __name__ == "__main__":
    main()
