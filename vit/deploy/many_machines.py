"""`vit predict --engine ray`: Ray Data reads images on many machines, and writes Parquet."""

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import ray
import ray.data

from vit.data.images import IMAGE_SUFFIXES
from vit.prediction.predictor import Predictor
from vit.runtime.console import echo

# at most, for a worker without a GPU
_CORES = 4
_TEXTS = pa.list_(pa.string())
# columns without a single value in some files
_TYPES = {
    "predicted": pa.string(),
    "labels": _TEXTS,
    "prediction_set": _TEXTS,
    "error": pa.string(),
}


class _Worker(Predictor):
    """Predicts in a process of its own."""

    def __call__(self, rows: Any) -> pa.Table:
        columns = {}
        for name, values in super().__call__(rows).items():
            columns[name] = pa.array(list(values), _TYPES.get(name), from_pandas=True)
        return pa.table(columns)


def predict_on_ray(places: Sequence[str], *, output: str, resume: bool, **options: Any) -> None:
    """Write a row with the columns of `vit.Predictor`, which takes the options, for each image that
    has none yet into a folder of Parquet files, or its address. With `resume` it may have rows.

    The places are folders and addresses of images, or tables (.csv) and Parquet with a column path.
    """
    # a mistake is told before the cluster starts
    _ = Predictor(**{**options, "device": "cpu"}).bundle
    with _connect():
        written = _read_written(output)
        if written and not resume:
            raise FileExistsError(f"{output} has rows; go on with --resume, or name another")
        resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
        num_gpus, num_cores = int(resources.get("GPU", 0)), int(resources["CPU"])
        workers = num_gpus or -(-num_cores // _CORES)
        for place in places:
            rows = _read(place, written).map_batches(
                _Worker,
                fn_constructor_kwargs=options,
                batch_size=256,
                compute=ray.data.ActorPoolStrategy(size=workers),
                num_gpus=int(num_gpus > 0),
                num_cpus=max(num_cores // workers - 1, 0.5),
            )
            rows.write_parquet(output)
    echo(f"the predictions are in {output}")


def _read(place: str, written: set[str]) -> ray.data.Dataset:
    """Read the images of a place that have no row yet."""
    if place.endswith(".csv"):
        rows = ray.data.read_csv(place)
    elif place.endswith(".parquet"):
        rows = ray.data.read_parquet(place)
    else:
        suffixes = [suffix.removeprefix(".") for suffix in IMAGE_SUFFIXES]
        rows = ray.data.read_binary_files(place, include_paths=True, file_extensions=suffixes)
        rows = rows.rename_columns({"bytes": "image"})

    if "path" not in rows.columns():
        raise ValueError(f"{place} has no column path, which names each image")
    return rows.filter(lambda row: row["path"] not in written)


def _read_written(output: str) -> set[str]:
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


@contextmanager
def _connect() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS or `ray start`; without one, start one here."""
    # Ray would report to its makers
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        yield
    except ray.exceptions.RayError as error:
        raise ValueError(f"a worker failed: {str(error).splitlines()[-1]}") from error
    finally:
        ray.shutdown()
