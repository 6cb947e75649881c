"""How time and memory grow with the side of an image, tokens, images, classes and processes, beside
theory.

    python research/growth.py --output benchmarks/results
    python research/growth.py --only "maps.npz"

Each point is measured once, in a process of its own that has run the smallest size before: seconds
of processor time (of one thread, and of processes that it starts; other work on the machine hardly
changes them) and how far the memory of the process rose above what its input takes. An exponent is
the slope of a straight line through the logarithms of the upper half of the points. Theory's is
that of the same line through what theory says at the same points: of n log n from 100,000 to
1,000,000 it is 1.08.
"""

import argparse
import ctypes
import math
import multiprocessing
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import growth_images as images
import growth_models as models
import numpy as np
import torch
from conditions import describe_conditions, write_result
from growth_models import Run
from study_tables import build_growth_table

NAME = "growth"
SIDES, MAP_SIDES = (32, 64, 128, 256, 512, 1024), (64, 128, 192, 256, 512, 736, 1024)
IMAGES, FILES = (
    (1_000, 10_000, 100_000, 300_000, 1_000_000),
    (1_000, 3_000, 10_000, 30_000, 100_000),
)
PAGES, CLASSES, PROCESSES = (
    (30, 100, 300, 1_000, 2_000, 4_000, 6_000),
    (2, 20, 200, 1_000, 5_000, 20_000),
    (1, 2, 4),
)
_SHORT, _MAX_REPEATS = 0.2, 50  # seconds below which a function is repeated
_MIN_BYTES = 4 << 20  # less is not told from what the process takes anyway

Growth = Callable[[int], float]


@dataclass(frozen=True)
class Row:
    """A measurement by size. What theory says of seconds and bytes is in any unit, and in words."""

    what: str
    by: str
    sizes: tuple[int, ...]
    prepare: Callable[[int, Path], Run]
    seconds: Growth
    bytes: Growth
    words: str
    at_most: bool = False  # a part that doesn't grow is left out of what theory says


def of_count(function: Callable[[int, int], Run], num_classes: int) -> Callable[[int, Path], Run]:
    return lambda count, folder: function(count, num_classes)


def of_classes(function: Callable[[int, int], Run], count: int) -> Callable[[int, Path], Run]:
    return lambda num_classes, folder: function(count, num_classes)


def intervals(count: int, num_classes: int) -> Run:
    return images.measure_intervals(images.make_scores(count, num_classes))


def report(count: int, num_classes: int) -> Run:
    return images.write_report(count, num_classes)(Path())


SIDE, TOKENS, COUNT, FILE, CLASS, PROCESS = (
    "side of an image, px",
    "tokens",
    "images",
    "files",
    "classes",
    "processes",
)
_MODEL, _LINEAR, _SORTING = "a·tokens + b·tokens²; tokens", "n; n", "n log n; n"


def _side(what: str, prepare: Callable[[int, Path], Run]) -> Row:
    return Row(what, SIDE, SIDES, prepare, models.count_flops, models.count_tokens, _MODEL)


def _map(method: str) -> Row:
    return Row(
        f"map: {method}",
        TOKENS,
        MAP_SIDES,
        models.run_map(method),
        models.count_flops,
        models.count_tokens,
        _MODEL,
    )


def _images(what: str, prepare: Callable[[int, Path], Run], sizes: tuple[int, ...] = IMAGES) -> Row:
    return Row(what, COUNT, sizes, prepare, models.linear, models.linear, _LINEAR)


def _sorted(
    what: str, prepare: Callable[[int, Path], Run], by: str = COUNT, sizes: tuple[int, ...] = IMAGES
) -> Row:
    return Row(what, by, sizes, prepare, models.sorting, models.linear, _SORTING)


def _classes(
    what: str, prepare: Callable[[int, Path], Run], words: str = "a + b·C; a + b·C"
) -> Row:
    return Row(what, CLASS, CLASSES, prepare, models.linear, models.linear, words, at_most=True)


def _processes(what: str, prepare: Callable[[int, Path], Run]) -> Row:
    return Row(
        what,
        PROCESS,
        PROCESSES,
        prepare,
        models.linear,
        models.constant,
        "a + b·p; 1",
        at_most=True,
    )


ROWS = (
    _side("forward pass", models.run_forward),
    _side("training step", models.run_step),
    Row(
        "reading a JPEG photo",
        SIDE,
        SIDES,
        models.read_photo,
        models.pixels,
        models.pixels,
        "pixels; pixels",
    ),
    _map("rollout"),
    _map("libra-removal"),
    Row(
        "gallery: every token",
        TOKENS,
        MAP_SIDES,
        models.describe_tokens,
        models.all_pairs,
        models.squared,
        "tokens³; tokens²",
    ),
    _images("gallery, files of at most 64 MB", images.write_gallery, PAGES),
    _images("maps.npz and manifest.json", images.write_maps, PAGES),
    _images("scoring, 10 classes", of_count(images.score, 10)),
    _images("intervals of all metrics", of_count(intervals, 10)),
    _sorted("report, 100 classes", of_count(report, 100)),
    _images("predictions.csv", images.write_predictions),
    _sorted("held-out splits", of_count(images.draw_split, 10)),
    _sorted("fingerprint", images.take_fingerprint),
    _sorted("order of an epoch", images.draw_order),
    _sorted("two workers, to the first batch", images.start_loader),
    _images("index of a Parquet file", images.open_parquet),
    _sorted("index of a folder", images.open_folder, FILE, FILES),
    Row("index of a table", FILE, FILES, images.open_table, models.linear, models.linear, _LINEAR),
    Row(
        "start of training, listed",
        FILE,
        FILES,
        images.start_listed,
        models.linear,
        models.linear,
        _LINEAR,
    ),
    _classes("training step, 8 images", models.run_step_of_classes),
    replace(
        _classes("scoring, 1,000 images", of_classes(images.score, 1_000), "C; bounded"),
        bytes=models.scored_rows,
    ),
    _classes("intervals, 10,000 images", of_classes(intervals, 10_000)),
    _classes("confusion.png, 10,000 images", images.write_confusion, "n + at most 1,000²"),
    _classes("report, 10,000 images", of_classes(report, 10_000)),
    _classes("classes of evaluation.json", images.describe_classes),
    _classes("held-out splits, 10,000 images", of_classes(images.draw_split, 10_000)),
    _classes("data.classes, 10,000 images", images.choose_half),
    _processes("5 training steps of 16 images", models.run_processes),
)


def read_memory(key: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{key}:"))


def measure(row: Row, size: int, folder: Path) -> dict[str, float]:
    """A point: `seconds` of processor time, `bytes` of memory, and `file`, bytes of the largest
    file, where one is written. To be called in a process of its own."""
    torch.set_num_threads(1)
    row.prepare(row.sizes[0], folder / "warm")()
    run = row.prepare(size, folder / "measured")
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
    before, spent, repeats = read_memory("VmRSS"), list[float](), 1
    while len(spent) < repeats:
        start = time.process_time(), resource.getrusage(resource.RUSAGE_CHILDREN)
        value = run()
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        of_children = children.ru_utime + children.ru_stime - start[1].ru_utime - start[1].ru_stime
        spent.append(
            value if isinstance(value, float) else time.process_time() - start[0] + of_children
        )
        if len(spent) == 1:
            rise = max(read_memory("VmHWM"), children.ru_maxrss * 1024 * (of_children > 0)) - before
            repeats = min(max(math.ceil(_SHORT / max(spent[0], 1e-6)), 1), _MAX_REPEATS)
    found = {"size": size, "seconds": sum(spent) / len(spent), "bytes": max(rise, 0)}
    return found | {"file": value} if isinstance(value, int) else found


def _send_point(sender: Any, *arguments: Any) -> None:
    sender.send(measure(*arguments))


def measure_row(row: Row, folder: Path) -> list[dict[str, float]]:
    context, points = multiprocessing.get_context("fork"), []
    for size in row.sizes:
        with TemporaryDirectory(dir=folder) as place:
            for name in ("warm", "measured"):
                (Path(place) / name).mkdir()
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_send_point, args=(sender, row, size, Path(place)))
            process.start()
            sender.close()
            points.append(receiver.recv())
            process.join()
        print(
            f"{row.what:36} {size:9,} {points[-1]['seconds']:10.4f} s {points[-1]['bytes'] / 2**20:9.1f} MiB",
            flush=True,
        )
    return points


def fit(row: Row, points: list[dict[str, float]]) -> dict[str, Any]:
    """Exponents of the upper half of the points, as measured and as theory has them; None where
    there is too little memory to tell."""
    upper = points[len(points) // 2 :] if len(points) > 3 else points
    sizes = [int(point["size"]) for point in upper]
    scale = [math.log(models.count_tokens(size) if row.by == TOKENS else size) for size in sizes]
    found: dict[str, Any] = {}
    for name, theory in (("seconds", row.seconds), ("bytes", row.bytes)):
        values = [point[name] for point in upper]
        told = name == "seconds" or (values[-1] >= _MIN_BYTES and values[0] >= _MIN_BYTES / 4)
        measured = float(np.polyfit(scale, np.log(values), 1)[0]) if told else None
        expected = float(np.polyfit(scale, [math.log(theory(size)) for size in sizes], 1)[0])
        found[name] = {
            "measured": None if measured is None else round(measured, 2),
            "theory": round(expected, 2),
        }
    return found


def draw(result: dict[str, Any], path: Path) -> None:
    """Seconds and memory against what grows, on logarithmic axes."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    axes_of = [SIDE, TOKENS, COUNT, FILE, CLASS, PROCESS]
    ratios = {"height_ratios": (4, 4, 2)}  # the last for the legends
    figure, grid = plt.subplots(
        3, len(axes_of), figsize=(18, 10), dpi=100, layout="constrained", gridspec_kw=ratios
    )
    colours = plt.get_cmap("tab20").colors  # type: ignore[attr-defined]
    for column, by in enumerate(axes_of):
        for number, (what, row) in enumerate(
            (what, row) for what, row in result["rows"].items() if row["by"] == by
        ):
            sizes = [
                models.count_tokens(int(p["size"])) if by == TOKENS else p["size"]
                for p in row["points"]
            ]
            told = {name: row["exponents"][name]["measured"] for name in ("seconds", "bytes")}
            exponents = ", ".join(
                "–" if value is None else f"{value:.2f}" for value in told.values()
            )
            style = {
                "marker": ".",
                "color": colours[2 * number % 20 + number // 10],
                "label": f"{what}: {exponents}",
            }
            grid[0, column].plot(sizes, [point["seconds"] for point in row["points"]], **style)
            grid[1, column].plot(
                sizes, [max(point["bytes"], 1) / 2**20 for point in row["points"]], **style
            )
        for axes, unit in zip(grid[:2, column], ("seconds of processor time", "MiB"), strict=True):
            axes.set(xscale="log", yscale="log", xlabel=by, ylabel=unit if column == 0 else None)
            low, high = axes.get_ylim()
            axes.set_ylim(max(low / 2, 0.5 if unit == "MiB" else 0), 2 * high)
            axes.grid(alpha=0.3)
        grid[2, column].axis("off")
        lines, title = (
            grid[0, column].get_legend_handles_labels(),
            "exponents of seconds and memory",
        )
        grid[2, column].legend(
            *lines, frameon=False, fontsize=7, loc="upper left", title=title, title_fontsize=7
        )
    figure.savefig(path)
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", help="measurements whose name holds this text")
    parser.add_argument("--smallest", type=int, help="so many of the smallest sizes, at least 2")
    parser.add_argument("--output", type=Path, help="folder for growth-<machine>.json")
    arguments = parser.parse_args()
    machine, start = describe_conditions("cpu"), time.perf_counter()
    result: dict[str, Any] = {"machine": machine, "rows": {}}
    with TemporaryDirectory() as folder:
        for row in ROWS:
            if arguments.only and arguments.only not in row.what:
                continue
            if arguments.smallest:
                row = replace(row, sizes=row.sizes[: arguments.smallest])
            points = measure_row(row, Path(folder))
            described = {
                "by": row.by,
                "words": row.words,
                "at_most": row.at_most,
                "exponents": fit(row, points),
            }
            name = row.what if row.what not in result["rows"] else f"{row.what}, by {row.by}"
            result["rows"][name] = described | {"points": points}
    result["seconds"] = round(time.perf_counter() - start)
    print(build_growth_table(result))
    if arguments.output:
        print(write_result(arguments.output, NAME, result))


if __name__ == "__main__":
    main()
