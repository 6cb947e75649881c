"""Predict images on many machines: Ray Data reads them, vit.Predictor predicts, Ray writes Parquet.

    python docs/cluster/predict_on_ray.py MODEL IMAGES --output FOLDER [--resume]

IMAGES is a folder, a table (.csv) or Parquet with a column `path` (and `image`, encoded), also at an
address that Ray knows (s3://). Each image gets one row with its answers and probabilities; with
--resume, images that have a row are left out. It joins the cluster of RAY_ADDRESS or `ray start`;
without one, Ray starts here. It needs pip install '.[ray]' in the clone of vit.
"""

import argparse
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import ray
import ray.data

import vit
from vit.data.images import IMAGE_SUFFIXES

# cores of a worker without a GPU
CORES = 4
# columns without a single value in some files
TEXTS = pa.list_(pa.string())
TYPES = {"predicted": pa.string(), "labels": TEXTS, "prediction_set": TEXTS, "error": pa.string()}
NUMBERS = ("probability", "p_value")


class Worker(vit.Predictor):
    """Predicts in a process of its own."""

    def __call__(self, rows: Any) -> pa.Table:
        paths = list(map(str, rows.pop("path")))
        images = rows.pop("image", paths)
        found = list(self.predict_items(zip(paths, images, strict=True)))
        answers = [prediction.to_dict() for prediction in found]
        columns = {
            name: pa.array([answer.get(name) for answer in answers], kind)
            for name, kind in {**TYPES, **dict.fromkeys(NUMBERS, pa.float64())}.items()
        }
        columns["path"] = pa.array(paths)
        probabilities = [prediction.probabilities for prediction in found]
        columns["probabilities"] = pa.array(probabilities, pa.list_(pa.float32()))
        # with the other columns of the table
        return pa.table({**rows, **columns})


def read_images(place: str, written: set[str]) -> ray.data.Dataset:
    """Read the images of a place that have no row yet."""
    if place.endswith(".csv"):
        rows = ray.data.read_csv(place)
    elif place.endswith(".parquet"):
        rows = ray.data.read_parquet(place)
    else:
        suffixes = [suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES]
        rows = ray.data.read_binary_files(place, include_paths=True, file_extensions=suffixes)
        rows = rows.rename_columns({"bytes": "image"})
    return rows.filter(lambda row: row["path"] not in written)


def read_written(output: str) -> set[str]:
    """Return the paths that have a row. A file that a killed job wrote in part is removed."""
    for part in Path(output).glob("*.parquet"):
        try:
            pq.read_metadata(part)
        except pa.ArrowInvalid:
            part.unlink()
    try:
        rows = ray.data.read_parquet(output, columns=["path"])
    except FileNotFoundError:
        return set()
    return {row["path"] for row in rows.iter_rows()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model")
    parser.add_argument("images")
    parser.add_argument("--output", required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--precision", default="auto")
    options = parser.parse_args()

    ray.init(include_dashboard=False)
    written = read_written(options.output)
    if written and not options.resume:
        parser.error(f"{options.output} has rows; go on with --resume, or name another")
    resources = ray.cluster_resources()
    num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources["CPU"])
    workers = num_gpus or -(-num_cores // CORES)
    rows = read_images(options.images, written).map_batches(
        Worker,
        fn_constructor_kwargs={
            "model": options.model,
            "device": options.device,
            "precision": options.precision,
        },
        batch_size=256,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_gpus=int(num_gpus > 0),
        num_cpus=max(num_cores // workers - 1, 0.5),
    )
    rows.write_parquet(options.output)


if __name__ == "__main__":
    main()
