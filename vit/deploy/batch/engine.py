"""`--engine ray`: Ray Data gives images to workers on many machines, and writes their rows.

Ray restarts a worker that was killed, and computes its images again.
"""

import io
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import signature
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
import ray
import ray.data
import torch

from vit.bundle import Bundle, open_model
from vit.data.dataset import printable
from vit.deploy.batch.inputs import Listed, check_names, list_files, open_contents, read_contents
from vit.deploy.batch.parts import Parts
from vit.explanation.explain import describe_parameters, explain
from vit.explanation.explainer import Explainer
from vit.explanation.items import ImageItem, read_file
from vit.explanation.methods.auto import MAX_CHECKED_IMAGES, choose_methods
from vit.explanation.records import ImageResult, MapResult
from vit.explanation.writer import draw_map
from vit.prediction.image_predictor import Predictor
from vit.runtime.arguments import first_line
from vit.runtime.console import echo
from vit.runtime.device import choose_device
from vit.runtime.files import clean_name

# at most, of a worker without a GPU
_CORES = 4
# cores of a task that reads or writes, and waits most of the time
_TASK_CORES = 0.25
# images that a worker gets at once
_MIN_IMAGES, _MAX_IMAGES = 64, 1024
_IMAGES_A_PART = 1024

_MAP = {
    "method": pa.string(),
    "target": pa.string(),
    "values": pa.list_(pa.list_(pa.float32())),
    "overlay": pa.binary(),
}
_MAPS = {
    "path": pa.string(),
    "predicted": pa.string(),
    "probability": pa.float64(),
    "maps": pa.list_(pa.struct(list(_MAP.items()))),
    "error": pa.string(),
}

Values = Mapping[str, Any]
# rows of `read_contents` → rows of the result
Compute = Callable[[pa.Table], pa.Table]


def predict_on_ray(
    places: Iterable[str], options: Values, *, output: str, workers: int | None, resume: bool
) -> None:
    """Write the columns of `vit.Predictor`, whose parameters are the options; see `_run`."""
    predictor = Predictor(**{**options, "device": "cpu"})
    # "auto" depends on the device of a worker
    facts = {**predictor.describe_options(), "precision": options["precision"]}
    build = partial(_build_predictor, options)
    _run(list_files(places), build, predictor.bundle, Parts(output, facts), workers, resume=resume)


def _build_predictor(options: Values, bundle: Bundle, device: str) -> Compute:
    predictor = Predictor(**{**options, "model": bundle, "device": device})

    def compute(rows: pa.Table) -> pa.Table:
        names, images = zip(*open_contents(rows), strict=True)
        return build_table(predictor({"path": np.array(names, dtype=object), "image": images}))

    return compute


def build_table(columns: Values) -> pa.Table:
    """Return columns of predictions as a table of pyarrow, with null for what is missing."""
    texts = pa.list_(pa.string())
    kinds = {"prediction_set": texts, "labels": texts}
    arrays = {}
    for name, values in columns.items():
        if values.dtype == object:
            cells = [printable(each) if isinstance(each, str) else each for each in values]
            arrays[name] = pa.array(cells, kinds.get(name, pa.string()))
        elif values.ndim == 1:
            arrays[name] = pa.array(values, from_pandas=True)
        else:
            is_missing = np.isnan(values[:, 0])
            lengths = np.where(is_missing, 0, values.shape[1])
            ends = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
            offsets = pa.array(ends, mask=np.append(is_missing, False))
            numbers = pa.array(values[~is_missing].ravel())
            arrays[name] = pa.ListArray.from_arrays(offsets, numbers)
    return pa.table(arrays)


def explain_on_ray(
    places: Iterable[str], options: Values, *, output: str, workers: int | None
) -> None:
    """Write the maps of `vit.explain`, whose parameters are the options; see `_run`."""
    parameters = signature(explain).parameters.values()
    options = {**{each.name: each.default for each in parameters}, **options}
    bundle = open_model(options["model"], device="cpu")
    names = ("target", "map_options", "batch_size")
    chosen = {name: options[name] for name in names}
    images = files, packed = list_files(places)
    # Images in packed files are not counted.
    num_images = len(files) + len(packed) * (MAX_CHECKED_IMAGES + 1)
    checks = options["checks"]
    chosen["sanity_checks"] = num_images <= MAX_CHECKED_IMAGES if checks is None else checks
    chosen["methods"] = choose_methods(options["methods"], bundle, num_images=num_images)
    # a wrong option is reported now
    facts = describe_parameters(Explainer(bundle, **chosen), options["target"])
    parts = Parts(output, {"model": bundle.sha256, **facts})
    build = partial(_build_explainer, chosen)
    _run(images, build, bundle, parts, workers, resume=False)


def _build_explainer(chosen: Values, bundle: Bundle, device: str) -> Compute:
    explainer = Explainer(open_model(bundle, device=device), **chosen)

    def describe(image: ImageResult, result: MapResult) -> Values:
        picture = draw_map(image, result)
        overlay = io.BytesIO()
        picture.save(overlay, "PNG")
        shown = (result.method.name, result.target_name, list(result.values), overlay.getvalue())
        return dict(zip(_MAP, shown, strict=True))

    def compute(rows: pa.Table) -> pa.Table:
        found: dict[str, Values] = {}

        def add(images: Sequence[ImageResult]) -> None:
            for image in images:
                predicted = image.describe_predicted(bundle.class_names)
                found[image.item.path] = {
                    "predicted": predicted["name"],
                    "probability": predicted["probability"],
                    "maps": [describe(image, result) for result in image.maps],
                }

        items = [
            ImageItem(path, clean_name(Path(path).stem), partial(read_file, path, image.load))
            for path, image in open_contents(rows)
        ]
        explained = explainer.explain(items, add)
        found |= {path: {"error": reason} for path, reason in explained.unreadable}
        listed = [{"path": item.path, **found[item.path]} for item in items]
        return pa.Table.from_pylist(listed, pa.schema(list(_MAPS.items())))

    return compute


class _Worker:
    """Computes rows in a process of its own."""

    def __init__(self, build: Callable[[Bundle, str], Compute], models: Any, cores: int) -> None:
        torch.set_num_threads(cores)
        self.compute = build(ray.get(models[0]), str(choose_device("auto")))

    def __call__(self, rows: pa.Table) -> pa.Table:
        return self.compute(rows)


def _run(
    images: Listed,
    build: Callable[[Bundle, str], Compute],
    bundle: Bundle,
    parts: Parts,
    workers: int | None,
    *,
    resume: bool,
) -> None:
    """Write a row for each image that has none. `build` makes a worker's function of the model and
    a device."""
    if resume:
        check_names(images)
    written = parts.prepare(resume=resume)
    files, packed = images
    files = files.filter(pc.invert(pc.is_in(files["path"], value_set=written)))
    if not len(files) and not packed:
        return
    with _connect():
        resources: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
        num_gpus = int(resources.get("GPU", 0))
        workers = workers or num_gpus or -(-int(resources["CPU"]) // _CORES)
        cores = max(int(resources["CPU"]) // workers, 1)
        size = min(max(len(files) // (64 * workers), _MIN_IMAGES), _MAX_IMAGES)
        blocks = [files.slice(start, size) for start in range(0, len(files), size)]
        for name, lister in packed.items():
            blocks.append(pa.table([[name], [pickle.dumps(lister)]], schema=files.schema))
        whole: Any = {"batch_size": None, "batch_format": "pyarrow"}
        rows: ray.data.Dataset = ray.data.from_arrow(blocks)
        rows = rows.map_batches(
            partial(read_contents, written=written.combine_chunks().sort()),
            **whole,
            num_cpus=_TASK_CORES,
        )
        if packed:
            rows = rows.repartition(target_num_rows_per_block=size)
        rows = rows.map_batches(
            _Worker,
            **whole,
            # in a list: Ray would copy it into the arguments
            fn_constructor_args=(build, [ray.put(bundle)], cores),
            compute=ray.data.ActorPoolStrategy(size=workers),
            num_gpus=int(num_gpus > 0),
            # the others are for tasks
            num_cpus=max(cores - 1, 0.5),
        )
        rows.write_datasink(_Sink(parts), ray_remote_args={"num_cpus": _TASK_CORES})


class _Sink(ray.data.Datasink[int]):
    """Writes the rows that Ray collects as a part."""

    min_rows_per_write = _IMAGES_A_PART

    def __init__(self, parts: Parts) -> None:
        self.parts = parts

    def write(self, blocks: Iterable[Any], ctx: object) -> int:
        rows = pa.concat_tables(blocks)
        # all images of a shard had rows already
        if not len(rows):
            return 0
        self.parts.write(rows)
        return len(rows) - int(rows["error"].null_count)

    def on_write_complete(self, write_result: Any) -> None:
        count, unreadable = write_result.num_rows, sum(write_result.write_returns)
        echo(f"{count:,} images, {unreadable:,} of them unreadable: {self.parts.output}")


@contextmanager
def _connect() -> Iterator[None]:
    """Connect to the cluster of RAY_ADDRESS or `ray start`; without one, start one here."""
    # Ray would report to its makers
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    is_ours = not ray.is_initialized()
    if is_ours:
        ray.init(include_dashboard=False, logging_level=logging.ERROR, log_to_driver=False)
    ray.data.DataContext.get_current().enable_progress_bars = sys.stderr.isatty()
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)
    try:
        yield
    except ray.exceptions.RayError as error:
        cause: BaseException = error
        while deeper := getattr(cause, "cause", None) or cause.__cause__:
            cause = deeper
        raise ValueError(f"a worker failed: {first_line(cause)}") from error
    finally:
        if is_ours:
            ray.shutdown()
